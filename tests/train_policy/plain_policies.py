"""Every replay policy once more in plain Python, one layer at a time, for comparison with the compiled ones.

Written from the papers and from the engine's rules, with lists and dictionaries where the compiled code has arrays and
turns. A policy here is a class with `step(experts) -> None` that counts misses and evictions.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache

import numpy as np

Step = tuple[int, ...]  # distinct experts, ascending


class Plain:
    """Counts, and the engine's rule for admission: the missed in order of worth, the least worth resident leaves."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.slots: list[int | None] = [None] * num_slots
        self.misses = self.evictions = 0

    def worth(self, expert: int) -> object:
        raise NotImplementedError

    def observe(self, experts: Step) -> None:
        """Counts a step before anybody is admitted."""

    def step(self, experts: Step) -> None:
        self.observe(experts)
        missed = [e for e in experts if e not in self.slots]
        self.misses += len(missed)
        missed.sort(key=self.worth, reverse=True)  # stable: equals stay ascending
        for expert in missed:
            free = [s for s, resident in enumerate(self.slots) if resident is None]
            others = [s for s, resident in enumerate(self.slots) if resident is not None and resident not in experts]
            if free:
                self.slots[free[0]] = expert
            elif others:
                self.slots[min(others, key=lambda s: self.worth(self.slots[s]))] = expert  # the first of equals
                self.evictions += 1


class Usage(Plain):
    """lru, lfu, lfru and decayed."""

    def __init__(self, num_slots: int, kind: str):
        super().__init__(num_slots)
        self.kind, self.clock = kind, 0
        self.last, self.uses, self.decayed = Counter(), Counter(), Counter()

    def observe(self, experts: Step) -> None:
        if not experts:
            return
        self.clock += 1
        for expert in self.decayed:
            self.decayed[expert] *= 0.5 ** (1 / 16)
        for expert in experts:
            self.last[expert] = self.clock
            self.uses[expert] += 1
            self.decayed[expert] += 1

    def worth(self, expert: int) -> object:
        age = self.clock - self.last[expert]
        match self.kind:
            case "lru":
                return -age
            case "lfu":
                return (self.uses[expert], -age)
            case "lfru":
                return Fraction(self.uses[expert], 1 + age)
        return self.decayed[expert]


class Static(Plain):
    def __init__(self, num_slots: int, uses: Sequence[int]):
        super().__init__(num_slots)
        self.uses = uses

    def worth(self, expert: int) -> object:
        return self.uses[expert]


class Min(Plain):
    """Looks for the next use in the steps to come; beyond `window` steps, decayed decides."""

    def __init__(self, num_slots: int, steps: Sequence[Step], window: int | None = None):
        super().__init__(num_slots)
        self.to_come, self.window = list(steps), window
        self.beyond = Usage(num_slots, "decayed")

    def observe(self, experts: Step) -> None:
        self.beyond.observe(experts)
        del self.to_come[0]

    def worth(self, expert: int) -> object:
        distance = next((i for i, step in enumerate(self.to_come, 1) if expert in step), 10**6)
        if self.window is None:
            return -distance
        return (1, -distance) if distance <= self.window else (0, self.beyond.worth(expert))


class PerAccess:
    """The step-atomic form of a per-access algorithm: hits first, then misses, the step's own experts pinned."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.misses = self.evictions = 0
        self.pinned: Step = ()

    def residents(self) -> list[int]:
        raise NotImplementedError

    def hit(self, expert: int) -> None:
        raise NotImplementedError

    def miss(self, expert: int) -> None:
        """Admits; must evict where `is_full`."""
        raise NotImplementedError

    @property
    def is_full(self) -> bool:
        return len(self.residents()) == self.num_slots

    def first_unpinned(self, queue: Sequence[int]) -> int | None:
        return next((e for e in queue if e not in self.pinned), None)

    def step(self, experts: Step) -> None:
        self.pinned = experts
        hits = [e for e in experts if e in self.residents()]
        for expert in hits:
            self.hit(expert)
        for expert in experts:
            if expert in hits:
                continue
            self.misses += 1
            if all(e in experts for e in self.residents()) and self.is_full:
                continue
            self.evictions += self.is_full
            self.miss(expert)


class Fifo(PerAccess):
    def __init__(self, num_slots: int):
        super().__init__(num_slots)
        self.queue: list[int] = []

    def residents(self) -> list[int]:
        return self.queue

    def hit(self, expert: int) -> None:
        pass

    def miss(self, expert: int) -> None:
        if self.is_full:
            self.queue.remove(self.first_unpinned(self.queue))
        self.queue.append(expert)


class LfuResident(PerAccess):
    def __init__(self, num_slots: int):
        super().__init__(num_slots)
        self.uses: dict[int, int] = {}  # in the order of the last use

    def residents(self) -> list[int]:
        return list(self.uses)

    def hit(self, expert: int) -> None:
        self.uses[expert] = self.uses.pop(expert) + 1

    def miss(self, expert: int) -> None:
        if self.is_full:
            by_uses = sorted(self.uses, key=self.uses.__getitem__)
            del self.uses[self.first_unpinned(by_uses)]
        self.uses[expert] = 1


class Arc(PerAccess):
    """Figure 4 of the paper."""

    def __init__(self, num_slots: int):
        super().__init__(num_slots)
        self.t1, self.t2, self.b1, self.b2 = ([] for _ in range(4))  # least recent first
        self.target = 0.0

    def residents(self) -> list[int]:
        return self.t1 + self.t2

    def hit(self, expert: int) -> None:
        (self.t1 if expert in self.t1 else self.t2).remove(expert)
        self.t2.append(expert)

    def miss(self, expert: int) -> None:
        c, in_b2 = self.num_slots, expert in self.b2
        if expert in self.b1:
            self.target = min(self.target + max(len(self.b2) / len(self.b1), 1), c)
            self.b1.remove(expert)
            self.replace(in_b2)
            self.t2.append(expert)
        elif in_b2:
            self.target = max(self.target - max(len(self.b1) / len(self.b2), 1), 0)
            self.b2.remove(expert)
            self.replace(in_b2)
            self.t2.append(expert)
        else:
            if len(self.t1) + len(self.b1) == c:
                if len(self.t1) < c:
                    del self.b1[0]
                    self.replace(in_b2)
                else:
                    self.t1.remove(self.first_unpinned(self.t1))
            elif self.is_full:
                if len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) == 2 * c:
                    del self.b2[0]
                self.replace(in_b2)
            self.t1.append(expert)

    def replace(self, in_b2: bool) -> None:
        if not self.is_full:
            return
        prefers_t1 = bool(self.t1) and (len(self.t1) > self.target or (in_b2 and len(self.t1) == self.target))
        pairs = [(self.t1, self.b1), (self.t2, self.b2)]
        if not prefers_t1 and self.t2:
            pairs.reverse()
        for queue, ghosts in pairs:
            victim = self.first_unpinned(queue)
            if victim is not None:
                queue.remove(victim)
                ghosts.append(victim)
                return


class S3Fifo(PerAccess):
    def __init__(self, num_slots: int):
        super().__init__(num_slots)
        self.small_size = max(num_slots // 10, 1)
        self.small, self.main, self.ghost = [], [], []
        self.hits: Counter = Counter()
        self.has_evicted = False

    def residents(self) -> list[int]:
        return self.small + self.main

    def hit(self, expert: int) -> None:
        self.hits[expert] += 1

    def miss(self, expert: int) -> None:
        was_ghost = expert in self.ghost
        if was_ghost:
            self.ghost.remove(expert)
        if self.is_full:
            self.has_evicted = True
            self.evict()
        warming_up = not self.has_evicted and len(self.small) >= self.small_size
        (self.main if was_ghost or warming_up else self.small).append(expert)
        self.hits[expert] = 0

    def evict(self) -> None:
        from_main = len(self.main) > self.num_slots - self.small_size
        while True:
            victim = self.first_unpinned(self.main if from_main else self.small)
            if victim is None:
                from_main = not from_main
            elif from_main:
                self.main.remove(victim)
                if not self.hits[victim]:
                    return
                self.hits[victim] = min(self.hits[victim], 3) - 1
                self.main.append(victim)
            else:
                self.small.remove(victim)
                if self.hits[victim] < 2:
                    self.ghost = [*self.ghost, victim][-int(0.9 * self.num_slots) :] if self.num_slots > 1 else []
                    return
                self.hits[victim] = 0
                self.main.append(victim)


class LeCar(PerAccess):
    def __init__(self, num_slots: int, seed: int):
        super().__init__(num_slots)
        self.random = np.random.RandomState(seed)
        self.uses: OrderedDict[int, int] = OrderedDict()  # in the order of the last use
        self.weight = {"lru": 0.5, "lfu": 0.5}
        self.history: dict[str, OrderedDict[int, int]] = {"lru": OrderedDict(), "lfu": OrderedDict()}
        self.now = 0

    def residents(self) -> list[int]:
        return list(self.uses)

    def hit(self, expert: int) -> None:
        self.now += 1
        self.uses[expert] = self.uses.pop(expert) + 1

    def step(self, experts: Step) -> None:
        before = self.misses
        streamed_from = self.now
        super().step(experts)
        # A streamed access takes time too.
        hits = len(experts) - (self.misses - before)
        self.now = streamed_from + hits + self.misses - before

    def miss(self, expert: int) -> None:
        self.now += 1
        for blamed, other in (("lru", "lfu"), ("lfu", "lru")):
            if expert in self.history[blamed]:
                ago = self.now - self.history[blamed].pop(expert)
                lowered = self.weight[blamed] * np.exp(-0.45 * 0.005 ** (ago / self.num_slots)) + 1e-10
                total = lowered + self.weight[other] + 2e-10
                self.weight = {blamed: lowered / total, other: (self.weight[other] + 1e-10) / total}
        if self.is_full:
            by_lru = self.first_unpinned(list(self.uses))
            by_lfu = self.first_unpinned(sorted(self.uses, key=self.uses.__getitem__))
            victim = by_lru
            if by_lru != by_lfu:
                chooser = "lru" if int(self.random.random_sample() * 100) / 100 < self.weight["lru"] else "lfu"
                victim = by_lru if chooser == "lru" else by_lfu
                self.history[chooser][victim] = self.now
                if len(self.history[chooser]) > self.num_slots // 2:
                    self.history[chooser].popitem(last=False)
            del self.uses[victim]
        self.uses[expert] = 1


def fewest_misses(steps: Sequence[Step], num_slots: int, *, must_admit: bool) -> int:
    """The least misses that any decisions give, by trying all of them."""

    @cache
    def best(index: int, resident: frozenset[int]) -> int:
        if index == len(steps):
            return 0
        step = frozenset(steps[index])
        missed = len(step - resident)
        return missed + min(best(index + 1, after) for after in _successors(resident, step))

    def _successors(resident: frozenset[int], step: frozenset[int]) -> list[frozenset[int]]:
        pool = resident | step
        if len(pool) <= num_slots:
            return [pool]
        if not must_admit:
            return _subsets(pool, num_slots)
        if len(step) >= num_slots:
            # The needed residents stay, and missed ones take every other slot.
            stay = step & resident
            return [stay | rest for rest in _subsets(step - stay, num_slots - len(stay))]
        return [step | rest for rest in _subsets(resident - step, num_slots - len(step))]

    return best(0, frozenset())


def _subsets(pool: frozenset[int], size: int) -> list[frozenset[int]]:
    from itertools import combinations

    return [frozenset(c) for c in combinations(sorted(pool), size)]


def plain_policy(name: str, num_slots: int, steps: Sequence[Step], num_experts: int, seed: int = 0):
    """The plain policy of a replay's name; `seed` is the layer's."""
    makers: dict[str, Callable] = {
        "static": lambda: Static(num_slots, np.bincount([e for s in steps for e in s], minlength=num_experts)),
        "min": lambda: Min(num_slots, steps),
        "fifo": lambda: Fifo(num_slots),
        "lfu-resident": lambda: LfuResident(num_slots),
        "arc": lambda: Arc(num_slots),
        "s3fifo": lambda: S3Fifo(num_slots),
        "lecar": lambda: LeCar(num_slots, seed),
    }
    if name in makers:
        return makers[name]()
    if name.startswith("min-window:"):
        return Min(num_slots, steps, window=int(name.split(":")[1]))
    return Usage(num_slots, name)
