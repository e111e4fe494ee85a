"""Coverage-guided hostile bytes for the decoder, by atheris (`pip install -e '.[fuzz]'`).

    python -m bench.fuzz.guided CORPUS -max_total_time=300

A message is two parts split at a length that the input's first two bytes give. What escapes decode
is printed with its input and kept as crash-*; options are libFuzzer's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["transport"]):
    from transport.codec import decode, encode
    from transport.frame import Buffer, FrameError

from bench.fuzz.frames import Hints, Maker

SEEDS = 200  # valid messages in a new corpus


def one_input(data: bytes) -> None:
    """Decode one message; what decodes must encode to what decodes to it."""
    size, rest = int.from_bytes(data[:2], "big"), data[2:]
    parts: list[Buffer] = [rest[:size]]
    if len(rest) > size:
        parts.append(rest[size:])
    try:
        frame, envelope = decode(parts)
    except FrameError:
        return
    assert decode(encode(frame, envelope)) == (frame, envelope)


def seed(folder: Path) -> None:
    """Valid messages of all kinds to begin with."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        return
    maker = Maker(Random(1), Hints())
    for index in range(SEEDS):
        header, *rest = [bytes(part) for part in encode(maker.frame(), maker.envelope())]
        if len(header) < 1 << 16:
            data = len(header).to_bytes(2, "big") + header + b"".join(rest)
            (folder / f"seed-{index}").write_bytes(data)


def main() -> None:
    folders = [each for each in sys.argv[1:] if not each.startswith("-")]
    for folder in folders[:1]:
        seed(Path(folder))
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
