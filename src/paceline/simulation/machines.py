"""Machines besides those that train: spares, and those under repair."""

import heapq


class Machines:
    """How many machines are missing, and until when."""

    def __init__(self, num_spares: int, repair_s: float) -> None:
        self.num_spares = num_spares
        self.repair_s = repair_s
        self._back_at: list[float] = []

    def lose(self, at_s: float, count: int) -> None:
        """So many machines break; each is back after its repair."""
        for _ in range(count):
            heapq.heappush(self._back_at, at_s + self.repair_s)

    def enough_at(self, now_s: float, *, besides: int = 0) -> float:
        """From when on there are enough machines for every rank, and so many more."""
        while self._back_at and self._back_at[0] <= now_s:
            heapq.heappop(self._back_at)
        lacking = len(self._back_at) + besides - self.num_spares
        if lacking <= 0:
            return now_s
        return (
            heapq.nsmallest(lacking, self._back_at)[-1]
            if lacking <= len(self._back_at)
            else (float("inf"))
        )
