"""The prompts of the benchmarks: 24 of them, from 5 to about 1,500 tokens of SmolLM2.

Raw text, no chat template, so that every bench and every server can send the same token ids.
"""

_STORY = (
    "The lighthouse keeper counted the ships each evening and wrote their names in a long green "
    "book. On the ninth of March the fog came early, and the last ship, a small grain carrier "
    "called the Patience, did not answer the horn. He lit the second lamp, although the rules "
    "allowed it only in a storm, and walked down to the rocks with a rope over his shoulder. "
)
_CODE = (
    "def merge(left, right):\n    result = []\n    while left and right:\n"
    "        source = left if left[0] <= right[0] else right\n"
    "        result.append(source.pop(0))\n    return result + left + right\n\n"
)
_FACTS = (
    "Copper melts at 1,085 degrees Celsius. The heart of a blue whale weighs as much as a small "
    "car. Venus turns so slowly that its day is longer than its year. The first postage stamp was "
    "sold in 1840. Glass is made of sand, soda ash and limestone. Honey does not spoil. "
)
_TABLE = "".join(
    f"{n:3d} | item {n * 37 % 101:3d} | price {n * 53 % 97:2d}.50\n" for n in range(110)
)

PROMPTS: tuple[str, ...] = (
    "The capital of France is",
    "Once upon a time",
    "import numpy as np\n\ndef",
    "Q: What is 7 times 8?\nA:",
    "Dear Sir or Madam, I am writing to",
    "The three laws of thermodynamics, in plain words, are:\n1.",
    "A recipe for a simple bread needs flour, water, salt and",
    "SELECT name, price FROM items WHERE",
    "Translate to French: good morning. Answer:",
    "1, 1, 2, 3, 5, 8, 13,",
    "Write a poem about the sea.\n\nThe sea",
    '{"name": "Ada", "age": 36, "languages": [',
    _FACTS + "In short, the text says that",
    _STORY + "When he reached the rocks, he",
    _CODE + "def merge_sort(items):\n",
    _CODE * 2 + "# The same function with type annotations:\n",
    _STORY * 2 + "Then",
    _FACTS * 3 + "The most surprising of these facts is",
    _TABLE[:1400] + "The cheapest item is",
    _CODE * 6 + "# Test\nassert merge([1, 3], [2]) ==",
    _STORY * 7 + "At dawn the keeper",
    _FACTS * 9 + "List the numbers mentioned above:",
    _STORY * 8 + _CODE * 4 + "Summary:",
    _TABLE + _FACTS * 2 + "The last line of the table is",
)
