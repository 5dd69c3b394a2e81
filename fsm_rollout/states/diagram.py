"""The table as a Mermaid state diagram and as Markdown, for the docs; a test keeps them true."""

from __future__ import annotations

from fsm_rollout.limits import TERMINAL, Status
from fsm_rollout.states.table import EDGES


def mermaid() -> str:
    """A `stateDiagram-v2` of every edge with its guards."""
    lines = ["stateDiagram-v2", f"    [*] --> {Status.PENDING.name}"]
    for edge in EDGES:
        guards = "".join(f"<br/>[{guard.__name__}]" for guard in edge.guards)
        lines += [
            f"    {source.name} --> {edge.dest.name}: {edge.event}{guards}"
            for source in edge.sources
        ]
    lines += [f"    {status.name} --> [*]" for status in Status if status in TERMINAL]
    return "\n".join(lines)


def markdown() -> str:
    """The same as a table: event, from, to, guards."""
    lines = ["| event | from | to | guards |", "|---|---|---|---|"]
    for edge in EDGES:
        sources = ", ".join(source.name for source in edge.sources)
        guards = ", ".join(guard.__name__ for guard in edge.guards) or "none"
        lines.append(f"| `{edge.event}` | {sources} | {edge.dest.name} | {guards} |")
    return "\n".join(lines)
