"""openai-python: two turns, the second one streamed."""

import sys

from openai import OpenAI

url, key, model = sys.argv[1:]
client = OpenAI(base_url=url, api_key=key)
messages = [{"role": "user", "content": "Name three rivers of Europe."}]
first = client.chat.completions.create(model=model, messages=messages, max_tokens=32)
said = first.choices[0].message.content
messages += [
    {"role": "assistant", "content": said},
    {"role": "user", "content": "And one of Asia?"},
]
usage = None
for chunk in client.chat.completions.create(
    model=model,
    messages=messages,
    max_tokens=32,
    stream=True,
    stream_options={"include_usage": True},
):
    for choice in chunk.choices:
        print(choice.delta.content or "", end="")
    usage = chunk.usage or usage
print("\ncached:", usage.prompt_tokens_details.cached_tokens)
assert usage.prompt_tokens_details.cached_tokens > 0
