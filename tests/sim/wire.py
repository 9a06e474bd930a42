"""How the double's tensors travel: through the group's store, looked at every millisecond, so that
no thread sits in a call that an abort cannot end."""

import contextlib
import os
import time

import torch

_LOOK_S = 0.001


class Aborted(Exception):
    """The group was aborted while this kernel waited."""


class Wire:
    """One rank's end."""

    def __init__(self, store, rank, size, aborted):
        self._parent, self._own = store, None
        self._rank, self._size, self._aborted = rank, size, aborted
        store.set(f"pid/{rank}", str(os.getpid()))

    @property
    def store(self):
        """A connection of its own, opened when it is first needed, as NCCL's are."""
        if self._own is None:
            self._own = self._parent.clone()
        return self._own

    def put(self, key, tensor):
        if self._aborted.is_set():
            raise Aborted
        self._ask(lambda: self.store.set(key, _bytes(tensor)))

    def get(self, key, like):
        self._until(lambda: self.store.check([key]))
        data = bytearray(self._ask(lambda: self.store.get(key)))
        dtype = like.dtype
        return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)

    def take(self, key, like):
        """Get, and let the sender know."""
        data = self.get(key, like)
        self._ask(lambda: self.store.delete_key(key))
        return data

    def until_taken(self, key):
        self._until(lambda: not self.store.check([key]))

    def all(self, key, mine, index):
        """Every rank's tensor, in the order of ranks. The last reader clears up."""
        return self._exchange(f"{key}/{index}", mine, lambda: self._all(f"{key}/{index}", mine))

    def all_split(self, key, mine, sizes):
        """Every rank's tensor with the sizes that it splits it into, which may differ."""

        def exchange():
            told = ",".join(map(str, sizes))
            self._ask(lambda: self.store.set(f"{key}/{self._rank}/sizes", told))
            found = [
                (part.view(-1, *mine.shape[1:]), self._sizes(f"{key}/{rank}/sizes"))
                for rank, part in enumerate(self._all(key, mine, is_split=True))
            ]
            self._clear(key, "sizes-read", [f"{rank}/sizes" for rank in range(self._size)])
            return found

        return self._exchange(key, mine, exchange)

    def _exchange(self, key, mine, exchange):
        try:
            return exchange()
        except Aborted:
            if os.environ.get("NCCL_DOUBLE_CONTAGION") == "1":
                self._infect(key, mine)
            raise

    def _infect(self, key, mine):
        """Let the neighbours' kernels pass, with garbage. NCCL's do where they write to each
        other's memory: an aborted kernel posts its steps without data (`postPeer`), and in LL sends
        on what it read (`readLL`, `storeLL`)."""
        with contextlib.suppress(RuntimeError):
            for rank in range(self._size):
                if not self.store.check([f"{key}/{rank}"]):
                    self.store.set(f"{key}/{rank}", _bytes(mine))

    def _all(self, key, mine, is_split=False):
        self.put(f"{key}/{self._rank}", mine)
        found = []
        for rank in range(self._size):
            data = self.get(f"{key}/{rank}", mine)
            found.append(data if is_split else data.view(mine.shape))
        self._clear(key, "read", list(map(str, range(self._size))))
        return found

    def _clear(self, key, count, names):
        if self._ask(lambda: self.store.add(f"{key}/{count}", 1)) == self._size:
            for name in (*names, count):
                self._ask(lambda name=name: self.store.delete_key(f"{key}/{name}"))

    def _sizes(self, key):
        self._until(lambda: self.store.check([key]))
        text = self._ask(lambda: self.store.get(key)).decode()
        return [int(each) for each in text.split(",") if each]

    def _until(self, is_ready):
        while not self._ask(is_ready):
            if self._aborted.is_set():
                raise Aborted
            time.sleep(_LOOK_S)

    def _ask(self, call):
        """A call to the store. Where that is gone, so is the network: nothing comes any more."""
        try:
            return call()
        except RuntimeError:
            self._aborted.wait()
            raise Aborted from None


def _bytes(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
