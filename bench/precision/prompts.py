"""200 prompts from fixed lists: questions, instructions, code, numbers, several languages."""

PLACES = (
    "France", "Japan", "Brazil", "Kenya", "Canada", "Norway", "Egypt", "India", "Mexico", "Poland",
)  # fmt: skip
ASKED = (
    "What is the capital of {}?",
    "Which languages do people in {} speak?",
    "Name one river in {}.",
    "Which countries border {}?",
    "What do people in {} eat for breakfast?",
)
THINGS = (
    "a prime number", "photosynthesis", "a black hole", "inflation", "the French Revolution",
    "a hash table", "vaccination", "the water cycle", "plate tectonics", "compound interest",
)  # fmt: skip
ORDERS = (
    "Explain {} in one sentence.",
    "Explain {} to a child.",
    "Write a short poem about {}.",
    "List three facts about {}.",
)
FUNCTIONS = (
    "reverses a string", "computes the factorial of n", "checks if a number is prime",
    "merges two sorted lists", "counts the words in a file", "finds the largest element of a list",
    "sorts a dictionary by value", "computes the n-th Fibonacci number",
)  # fmt: skip
LANGUAGES = ("Python", "JavaScript", "C", "SQL")
SENTENCES = (
    "The weather is nice today.", "Where is the railway station?", "I would like a cup of coffee.",
    "My brother works in a hospital.", "The book is on the table.",
)  # fmt: skip
TONGUES = ("French", "German", "Spanish", "Italian", "Portuguese")
FOREIGN = (
    "Quelle est la capitale de l'Italie ?", "Was ist die Hauptstadt von Deutschland?",
    "¿Cuál es la capital de España?", "Qual é a capital de Portugal?",
    "Qual è la capitale della Grecia?", "Expliquez la photosynthèse en une phrase.",
    "Erkläre mir, was ein Computer ist.", "¿Qué es un agujero negro?",
    "Raconte-moi une courte histoire.", "Nenne drei Tiere, die im Wald leben.",
    "日本の首都はどこですか？", "中国的首都是哪里？", "Какой город является столицей России?",
)  # fmt: skip
REQUESTS = (
    "Hello! Who are you?", "Tell me a joke.", "Write a haiku about the sea.",
    "Give me a recipe for pancakes.", "How do I tie a tie?", "What is the meaning of life?",
    "Rewrite this politely: Give me the report now.", "Summarise: The cat sat and slept.",
    "Is the following review positive or negative? I loved this film.",
    "Complete the sentence: The quick brown fox", "Who wrote Romeo and Juliet?",
    "Which is heavier, a kilogram of iron or a kilogram of feathers?",
    "Sort these words: pear, apple, orange, banana.", "What is the opposite of hot?",
    "In which year did the Second World War end?", "Write an email that declines a meeting.",
    "What does HTTP stand for?", "Fix the grammar: She go to school yesterday.",
    "What colour is the sky at night?", "Convert 100 degrees Fahrenheit to Celsius.",
)  # fmt: skip


def prompts() -> list[str]:
    """200 prompts without duplicates, in a fixed order that mixes the kinds."""
    kinds: list[list[str]] = [
        [asked.format(place) for place in PLACES for asked in ASKED],
        [order.format(thing) for thing in THINGS for order in ORDERS],
        [f"Write a function in {name} that {does}." for does in FUNCTIONS for name in LANGUAGES],
        [f"Translate into {to}: {said}" for said in SENTENCES for to in TONGUES],
        [f"What is {7 * n + 3} {'+-*'[n % 3]} {5 * n + 2}?" for n in range(1, 21)],
        list(FOREIGN),
        list(REQUESTS),
    ]
    longest = max(map(len, kinds))
    return [kind[at] for at in range(longest) for kind in kinds if at < len(kind)]
