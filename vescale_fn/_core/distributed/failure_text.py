"""How a launch that failed is told: the rank that was first, in full, and what is known of the others."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from .worker import Message

BROKEN = re.compile("[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|remote process exited")
LATE = re.compile("[Tt]ime(d |)out")
OF_TRANSPORT = re.compile("raised (RuntimeError|Dist[A-Za-z]*Error)")  # a user's own TimeoutError is none


def how_it_ended(code: int | str | None) -> str:
    """A process's exit code in words; words already, where no code is known."""
    if isinstance(code, str):
        return code
    if code is None or code >= 0:
        return f"exited with code {code} and returned nothing"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def first_and_others(
    failed: list[Message], returned: list[int], nprocs: int, at: Mapping[int, str] | None = None
) -> str:
    """The message of a failed launch: the first failure in full, a line for each other one, and where the rest were."""
    first, *others = failed
    if first.kind == "late":
        some = ", ".join(str(message.rank) for message in failed)
        text = f"launch: rank{'s' * (len(failed) > 1)} {some} of {nprocs} {first.title}; the ranks were ended"
        return "\n".join([text, *(f"  * rank {rank} {doing}" for rank, doing in sorted((at or {}).items()))])
    text = f"launch: rank {first.rank} of {nprocs} {first.title}; the other ranks were ended"
    gone = f"rank{'s' * (len(returned) > 1)} {', '.join(map(str, sorted(returned)))} had returned"
    if returned and waited(first) and not at:  # its words are those of the transport, which knows no ranks
        text = (
            f"launch: rank {first.rank} of {nprocs} waited in a collective that others had left out: {gone} by then. "
            f"It {first.title}; the other ranks were ended"
        )
        returned = []
        text += "\n  Instead: call the same collectives on every rank, in the same order, before fn returns"
    text += "\n\n" + first.text if first.text else ""
    for other in others:
        said = re.sub(rf"^[\w.]*{re.escape(other.title.rpartition(' ')[2])}: ", "", said_first(other.text))[:200]
        at_line = f" at {other.line}" if waited(other) and other.line else ""
        text += f"\nAfter it, rank {other.rank} {other.title}{at_line}" + (f": {said}" if said else "")
    if returned:  # perhaps the cause: it left out a collective that the others wait in
        text += f"\nBy then {gone}."
    for rank, doing in sorted((at or {}).items()):
        text += f"\nMeanwhile rank {rank} {doing}."
    if waited(first) or "SIGABRT" in first.title:  # with which gloo and NCCL end what does not fit together
        text += "\nUnder `with vfn.debug():` ranks whose calls differ say so, and which."
    return text


def waited(message: Message) -> bool:
    """Whether a rank failed in a collective because another one was gone or did not come."""
    of_others = BROKEN.search(message.text) or LATE.search(said_first(message.text))
    return bool(OF_TRANSPORT.fullmatch(message.title) and of_others)


def said_first(text: str) -> str:
    """The first line of a traceback's message: what stands below the frames, which are indented."""
    lines = text.strip().split("\n")
    frames = [i for i, line in enumerate(lines) if line.startswith("  File ")]
    below = (line for line in lines[frames[-1] + 1 if frames else 0 :] if line and not line.startswith("  "))
    return next(below, lines[-1])
