"""JSON schemas of the fields of a request, by kind, for the OpenAPI document. Pure.

The readers of fields (fields.py and its neighbours) check the same, with better messages.
"""

from __future__ import annotations

from typing import Any

from backends.tensors import ANSWERS_MAX

INT32 = 2**31  # a 32-bit integer is -INT32 to INT32 - 1
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # OpenAI's
# Keys of structured_outputs that vLLM's older fields `guided_KEY` have too -> their schemas.
GUIDES: dict[str, dict[str, Any]] = {
    "json": {"type": ["object", "string"]},
    "regex": {"type": "string", "minLength": 1},
    "choice": {"type": "array", "items": {"type": "string"}, "minItems": 1},
    "grammar": {"type": "string", "minLength": 1},
}
SECONDS_MIN, SECONDS_MAX = 0.001, 86400
TEMPERATURE_MAX = 2  # OpenAI's limit; the conductor's own is wider
INTEGER_SCHEMA = {"type": ["integer", "null"], "minimum": -INT32, "maximum": INT32 - 1}
TOKENS_SCHEMA = {"type": "array", "items": INTEGER_SCHEMA | {"type": "integer"}, "minItems": 1}
SCHEMAS: dict[str, dict[str, Any]] = {
    "integer": INTEGER_SCHEMA,
    "seed": {"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**64 - 1},
    "answers": {"type": ["integer", "null"], "minimum": 1, "maximum": ANSWERS_MAX},
    "number": {"type": ["number", "null"]},
    "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": TEMPERATURE_MAX},
    "seconds": {"type": ["number", "null"], "minimum": SECONDS_MIN, "maximum": SECONDS_MAX},
    "flag": {"type": ["boolean", "null"]},
    "text": {"type": ["string", "null"]},
    "object": {"type": ["object", "null"]},
    "effort": {"enum": [*EFFORTS, None]},
    "tools": {
        "type": ["array", "null"],
        "items": {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string"},
                        "description": {"type": ["string", "null"]},
                        "parameters": {"type": ["object", "null"]},
                        "strict": {"type": ["boolean", "null"]},
                    },
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
            "required": ["function"],
        },
    },
    "tool_choice": {
        "anyOf": [
            {"enum": ["none", "auto", "required", None]},
            {
                "type": "object",
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "properties": {"name": {"type": "string"}},
                        "required": ["name"],
                    },
                },
                "required": ["type", "function"],
            },
        ]
    },
    "stop": {
        "anyOf": [
            {"type": ["string", "null"], "minLength": 1},
            {"type": "array", "items": {"type": "string", "minLength": 1}},
        ]
    },
    "format": {
        "anyOf": [
            {"type": "null"},
            {
                "type": "object",
                "properties": {"type": {"enum": ["text", "json_object"]}},
                "required": ["type"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "required": ["type", "json_schema"],
                "additionalProperties": False,
                "properties": {
                    "type": {"const": "json_schema"},
                    "json_schema": {
                        "type": "object",
                        "required": ["schema"],
                        "additionalProperties": False,
                        "properties": {
                            "name": {"type": "string"},
                            "description": {"type": ["string", "null"]},
                            "strict": {"type": ["boolean", "null"]},
                            "schema": {"type": "object"},
                        },
                    },
                },
            },
        ]
    },
    "guide": {
        "type": ["object", "null"],
        "properties": {**GUIDES, "json_object": {"const": True}},
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
    },
    **{f"guided_{key}": {"anyOf": [{"type": "null"}, each]} for key, each in GUIDES.items()},
    "logit_bias": {
        "type": ["object", "null"],
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number"},
    },
    "token_ids": {"type": ["array", "null"], "items": INTEGER_SCHEMA | {"type": "integer"}},
    "stream_options": {
        "type": ["object", "null"],
        "properties": {
            "include_usage": {"type": ["boolean", "null"]},
            "include_obfuscation": {"type": ["boolean", "null"]},
            "continuous_usage_stats": {"type": ["boolean", "null"]},
        },
        "additionalProperties": False,
    },
    "prompt": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
            TOKENS_SCHEMA,
            {"type": "array", "items": TOKENS_SCHEMA, "minItems": 1},
        ]
    },
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                "content": {"type": ["string", "null"]},
                "tool_calls": {"type": ["array", "null"]},
                "tool_call_id": {"type": ["string", "null"]},
                "name": {"type": ["string", "null"]},
                "refusal": {"type": ["string", "null"]},
                "annotations": {"type": ["array", "null"]},
                "reasoning_content": {"type": ["string", "null"]},
                "provider_specific_fields": {"type": ["object", "null"]},
            },
            "required": ["role"],
            "additionalProperties": False,
        },
    },
}
FUNCTION_TOOL = SCHEMAS["tools"]["items"]["properties"]["function"]
SCHEMAS |= {
    "input": {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]
    },
    "response_tools": {
        "type": ["array", "null"],
        "items": {
            **FUNCTION_TOOL,
            "properties": {"type": {"const": "function"}, **FUNCTION_TOOL["properties"]},
            "required": ["type", "name"],
        },
    },
    "response_choice": {
        "anyOf": [
            {"enum": ["none", "auto", "required", None]},
            {
                "type": "object",
                "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
                "required": ["type", "name"],
            },
        ]
    },
    "response_text": {
        "type": ["object", "null"],
        "properties": {
            "verbosity": {"enum": ["medium", None]},
            "format": {
                "type": ["object", "null"],
                "properties": {
                    "type": {"enum": ["text", "json_object", "json_schema"]},
                    "name": {"type": "string"},
                    "description": {"type": ["string", "null"]},
                    "strict": {"type": ["boolean", "null"]},
                    "schema": {"type": "object"},
                },
                "required": ["type"],
                "additionalProperties": False,
            },
        },
        "additionalProperties": False,
    },
    "reasoning": {
        "type": ["object", "null"],
        "properties": {
            "effort": SCHEMAS["effort"],
            "summary": {"enum": ["auto", "concise", "detailed", None]},
            "generate_summary": {"enum": ["auto", "concise", "detailed", None]},
        },
        "additionalProperties": False,
    },
    "output_config": {"type": ["object", "null"]},
    "turns": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "properties": {
                "role": {"enum": ["user", "assistant"]},
                "content": {
                    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]
                },
            },
            "required": ["role", "content"],
        },
    },
    "system": {
        "anyOf": [
            {"type": ["string", "null"]},
            {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    "required": ["type", "text"],
                },
            },
        ]
    },
    "anthropic_tools": {
        "type": ["array", "null"],
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "description": {"type": "string"},
                "input_schema": {"type": "object"},
            },
            "required": ["name", "input_schema"],
        },
    },
    "anthropic_choice": {
        "type": ["object", "null"],
        "properties": {"type": {"enum": ["auto", "any", "none", "tool"]}},
        "required": ["type"],
    },
    "thinking": {
        "type": ["object", "null"],
        "properties": {"type": {"enum": ["enabled", "adaptive", "disabled"]}},
        "required": ["type"],
    },
    "include": {"type": ["array", "null"], "items": {"type": "string"}},
    "metadata": {
        "type": ["object", "null"],
        "maxProperties": 16,
        "additionalProperties": {"type": "string", "maxLength": 512},
    },
}
TOKENIZE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "model": SCHEMAS["text"],
        "prompt": {"type": "string"},
        "messages": SCHEMAS["messages"],
        "add_special_tokens": SCHEMAS["flag"],
        "tools": SCHEMAS["tools"],
        "chat_template_kwargs": SCHEMAS["object"],
        "add_generation_prompt": SCHEMAS["flag"],
        "continue_final_message": SCHEMAS["flag"],
    },
    "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
    "additionalProperties": False,
}


DETOKENIZE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "model": SCHEMAS["text"],
        "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    },
    "required": ["tokens"],
    "additionalProperties": False,
}
