"""Which nodes have fallen silent, and when silence is proof enough. Pure: the clock is handed in.

Never from one missed beat. A silent agent is suspected, asked by another way (a datagram that a
thread of its own answers) and looked at by what its ranks do (a step that all ranks finish needs
its ranks too); only when nothing speaks for it is it lost. An agent that answers, or whose ranks
go on, while its messages do not come gets `TIMES_ALIVE` as long: nobody can command its workers.
"""

from dataclasses import dataclass

BEAT_EVERY_S = 0.2
"""Between two beats of an agent: 5 Hz, the rate the figures of others are given for."""

SUSPECT_SHARE = 0.5
"""Share of the heartbeat limit, after which a silent agent is asked by another way. A guess: the
answer has the other half to come."""

TIMES_ALIVE = 6.0
"""How many heartbeat limits an agent may be silent that something else speaks for. A guess: a
garbage collection or a full network queue is over by then."""

STEPS_ALIVE = 2
"""Steps all ranks must have finished since an agent fell silent to speak for its ranks. One may
have been on its way when they died."""

MOST_UNSEEN_S = 1.0
"""A controller that has not looked for so long was stopped itself, and starts counting anew."""


@dataclass(slots=True)
class _Node:
    heard_s: float
    """When a beat or a message came last."""

    answered_s: float = 0.0
    """When it answered when asked last."""

    asked_s: float = 0.0
    steps_since: int = 0
    """Steps that all ranks finished since it was heard last."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What to do about silent nodes now."""

    ask: list[int]
    """Ask these by the second way."""

    lost: list[tuple[int, float]]
    """These are lost, after so many seconds of silence."""


class Beats:
    """When each node was heard."""

    def __init__(self, *, heartbeat_s: float) -> None:
        """Args:
        heartbeat_s: Silence after which a node is lost that nothing speaks for.
        """
        self._heartbeat_s = heartbeat_s
        self._nodes: dict[int, _Node] = {}
        self._checked_s: float | None = None

    def joined(self, node: int, now_s: float) -> None:
        self._nodes[node] = _Node(now_s)

    def left(self, node: int) -> None:
        self._nodes.pop(node, None)

    def heard(self, node: int, now_s: float) -> None:
        """A beat, or any message."""
        known = self._nodes.get(node)
        if known is not None:
            known.heard_s = now_s
            known.steps_since = 0

    def answered(self, node: int, now_s: float) -> None:
        """It answered by the second way."""
        known = self._nodes.get(node)
        if known is not None:
            known.answered_s = now_s

    def step_finished(self) -> None:
        """Every rank has finished one more step."""
        for known in self._nodes.values():
            known.steps_since += 1

    def check(self, now_s: float) -> Checked:
        """Whom to ask, and who is lost; call it a few times a second.

        >>> beats = Beats(heartbeat_s=2.0)
        >>> beats.joined(0, 0.0)
        >>> [beats.check(at / 4) for at in range(1, 5)][-1]
        Checked(ask=[0], lost=[])
        >>> [beats.check(at / 4).lost for at in range(5, 9)][-1]
        [(0, 2.0)]
        """
        if self._checked_s is not None and now_s - self._checked_s > MOST_UNSEEN_S:
            for known in self._nodes.values():
                known.heard_s = max(known.heard_s, now_s)
        self._checked_s = now_s
        suspect_s = self._heartbeat_s * SUSPECT_SHARE
        ask: list[int] = []
        lost: list[tuple[int, float]] = []
        for node, known in self._nodes.items():
            silent_s = now_s - known.heard_s
            if silent_s < suspect_s:
                continue
            if known.asked_s < known.heard_s:
                known.asked_s = now_s
                ask.append(node)
            elif silent_s >= self._limit_s(known, suspect_s, now_s):
                lost.append((node, silent_s))
            elif now_s - known.asked_s >= suspect_s / 2:
                known.asked_s = now_s
                ask.append(node)
        for node, _ in lost:
            del self._nodes[node]
        return Checked(ask, lost)

    def _limit_s(self, known: _Node, suspect_s: float, now_s: float) -> float:
        speaks = now_s - known.answered_s < suspect_s or known.steps_since >= STEPS_ALIVE
        return self._heartbeat_s * (TIMES_ALIVE if speaks else 1.0)
