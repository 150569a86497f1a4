"""Draw the life of a request into scheduling.md from the table the core enforces.

python docs/draw_transitions.py            rewrite the diagram
python docs/draw_transitions.py --check    exit status 1 if it is not up to date
"""

from __future__ import annotations

import sys
from pathlib import Path

from scheduler_svc.core.request import FINISHED, TRANSITIONS, Status

DOCUMENT = Path(__file__).with_name("scheduling.md")
_BEGIN, _END = "<!-- transitions: begin -->", "<!-- transitions: end -->"


def diagram() -> str:
    """The table as a Mermaid state diagram; transitions to the ends that all have in common are drawn once."""
    everywhere = frozenset.intersection(*(to for to in TRANSITIONS.values() if to)) & FINISHED
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> WAITING"]
    for status, successors in TRANSITIONS.items():
        lines += [f"    {status.name} --> {to.name}" for to in Status if to in successors and to not in everywhere]
    lines.append(
        f"    note right of WAITING: from any of these also to {', '.join(sorted(s.name for s in everywhere))}"
    )
    lines += [f"    {status.name} --> [*]" for status in Status if status in FINISHED]
    return "\n".join([*lines, "```"])


def redrawn(text: str) -> str:
    """The document with the present diagram."""
    head, rest = text.split(_BEGIN)
    _, tail = rest.split(_END)
    return f"{head}{_BEGIN}\n{diagram()}\n{_END}{tail}"


def main() -> int:
    text = DOCUMENT.read_text(encoding="utf-8")
    fresh = redrawn(text)
    if "--check" in sys.argv[1:]:
        if fresh != text:
            print(f"{DOCUMENT.name} is not up to date: python docs/draw_transitions.py")
        return int(fresh != text)
    DOCUMENT.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
