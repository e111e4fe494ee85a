"""Tiny tokenizers with tool templates of three families, and a toy that says what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from coord.tokenizer import Parts, TextTokenizer
from coord.toolcalls import Style
from pipeline.model import Output, ToyModel
from transport.frame import Result, Segment, Tensor

# Smaller than the families' own, and alike in what matters here: where definitions, calls and
# results stand, and how they are written.
_QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>\\n{"name": <function-name>, "arguments": <args-json-object>}<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if m.content %}{{ '\\n' + m.content }}{% endif %}
        {%- for call in m.tool_calls %}
            {%- set call = call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- (call.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
_LLAMA = """
{{- '<|begin_of_text|>' }}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
        {{- '<|eot_id|>' }}
    {%- elif m.role == 'tool' or m.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) }}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
        {%- if tools and loop.first %}
            {{- '<|python_tag|> is not needed. Functions:\\n' }}
            {%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\\n\\n' }}{% endfor %}
        {%- endif %}
        {{- (m.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
_MISTRAL = """
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is undefined) %}
        {%- if (m.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('user and assistant must alternate, tool calls aside') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- '<s>' }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and m == users[-1] %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric, of length 9!') }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{ ', ' }}{% endif %}
        {%- endfor %}
        {{- ']</s>' }}
    {%- elif m.role == 'assistant' %}
        {{- m.content + '</s>' }}
    {%- else %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {Style.HERMES: _QWEN, Style.LLAMA3: _LLAMA, Style.MISTRAL: _MISTRAL}
# Control tokens, the one that ends a turn first; and the tokens that are text.
_CONTROL = {
    Style.HERMES: ("<|im_end|>", "<|im_start|>"),
    Style.LLAMA3: (
        "<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
        "<|python_tag|>",
    ),
    Style.MISTRAL: (
        "</s>", "<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    ),
}  # fmt: skip
_TEXT = {Style.HERMES: ("<tool_call>", "</tool_call>")}
_MERGES = [("e", "r"), ("n", "a"), ("m", "e"), ("na", "me"), ("Ġ", '"'), ('"', ":"), ("Ġ", "{")]


def family(style: Style) -> TextTokenizer:
    """A byte-level vocabulary with a few merges, the family's marks, and its template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    for left, right in _MERGES:
        vocabulary[left + right] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, _MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(_CONTROL[style]))
    backend.add_tokens(list(_TEXT.get(style, ())))
    end = backend.token_to_id(_CONTROL[style][0])
    assert end is not None
    return TextTokenizer(backend, Parts(TEMPLATES[style], None, {}, [end]))


def oddly(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Ids of a text as the tokenizer would not choose them: no merges, marks excepted."""
    assert tokenizer.style is not None
    ids: list[int] = []
    at = 0
    while at < len(text):
        mark = next((m for m in tokenizer.style.marks if text.startswith(m, at)), text[at])
        ids += tokenizer.encode(mark, special=False)
        at += len(mark)
    return ids


class Scripted(ToyModel):
    """The toy's rows and hashes; `script` is what the next turn says, then `end`."""

    def __init__(self, tokenizer: TextTokenizer, index: int) -> None:
        size = tokenizer.vocabulary
        super().__init__((index, index + 1), 2, slots=4, capacity=4096, vocabulary=size)
        self._end = tokenizer.stops[0]
        self._script: list[int] = []
        self._from: int | None = None

    def say(self, script: list[int]) -> None:
        """Of the turn that is asked next."""
        self._script, self._from = script, None

    def forward(
        self,
        segments: Sequence[Segment],
        payload: Tensor | None,
        histories: Sequence[Sequence[int]] = (),
    ) -> Output:
        """See StageModel."""
        output = super().forward(segments, payload, histories)
        return Output(output.payload, tuple(map(self._told, output.results)))

    def _told(self, result: Result) -> Result:
        if not self._script:
            return result
        tokens = []
        for position in range(result.start + 1, result.start + 1 + len(result.tokens)):
            self._from = position if self._from is None else self._from
            at = position - self._from
            tokens.append(self._script[at] if at < len(self._script) else self._end)
        return replace(result, tokens=tuple(tokens))
