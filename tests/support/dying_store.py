"""A store that kills its process at a chosen request. Needs only torch, because launched scripts import it by
itself."""

import dataclasses
import os
import re
import signal
from datetime import timedelta

import torch.distributed as dist

TIMEOUT = timedelta(seconds=30)


@dataclasses.dataclass
class DeathPoint:
    """When a rank dies in its first life: after `moment` kinds of store requests for `group`, before a new kind."""

    rank: int
    group: str
    moment: int


class DyingStore(dist.Store):
    """A connection to the store that kills its process at the moment of its death."""

    def __init__(self, store: dist.Store, death: DeathPoint):
        super().__init__()
        self.store, self.death, self.asked = store, death, set()

    def _live(self, what: str, key: str):
        # Generated names are long and differ between runs, so each part of 24 or more characters counts as the same.
        kind = (what, *(part if len(part) < 24 else "-" for part in key.split("/")))
        # torch names the groups of a job by numbers: their keys begin with 0//, 0//1//, 0//2//.
        names = re.match(r"\d+(//\d+)*(?=/)", key)
        if names and names[0].split("//")[-1] == self.death.group:
            self.asked.add(kind)
            if len(self.asked) > self.death.moment:
                os.kill(os.getpid(), signal.SIGKILL)

    def set(self, key, value):
        self._live("set", key)
        self.store.set(key, value)

    def get(self, key):
        self._live("get", key)
        return self.store.get(key)

    def compare_set(self, key, expected, desired):
        self._live("compare_set", key)
        return self.store.compare_set(key, expected, desired)

    def add(self, key, value):
        self._live("add", key)
        return self.store.add(key, value)

    def check(self, keys):
        self._live("check", keys[0])
        return self.store.check(keys)

    def wait(self, keys, timeout=TIMEOUT):
        self._live("wait", keys[0])
        self.store.wait(keys, timeout)

    def multi_get(self, keys):
        self._live("get", keys[0])
        return self.store.multi_get(keys)

    def multi_set(self, keys, values):
        self._live("set", keys[0])
        self.store.multi_set(keys, values)

    def delete_key(self, key):
        self._live("delete_key", key)
        return self.store.delete_key(key)

    # torch's trampoline for stores that are written in Python looks up the C++ name.
    deleteKey = delete_key

    def num_keys(self):
        return self.store.num_keys()

    def has_extended_api(self):
        return self.store.has_extended_api()
