"""The object that the scripts of all agents request: a city and a number of days."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

CITIES = ("Paris", "Rome", "Oslo")
QUESTION = "What is the weather in Rome?"


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)
