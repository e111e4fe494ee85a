"""aider, by its own scripting interface: two questions in one chat."""

import os
import sys

from aider.coders import Coder
from aider.io import InputOutput
from aider.models import Model

url, key, model = sys.argv[1:]
os.environ |= {"OPENAI_API_BASE": url, "OPENAI_API_KEY": key}
coder = Coder.create(
    main_model=Model(f"openai/{model}"),
    io=InputOutput(yes=True, pretty=False),
    edit_format="ask",
    use_git=False,
    stream=True,
)
coder.main_model.extra_params = {"max_tokens": 32}
coder.run("What is a list in Python?")
coder.run("And a tuple?")
