"""What waits for what in a pipeline: tasks in the order of each rank, and transfers between ranks, as one graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from .actions import Action, Task, actions_of


class Transfer(NamedTuple):
    """What one action hands to another on another rank: activations of F, or gradients of B."""

    source: int  # ranks
    target: int
    made: Action
    used: Action


@dataclass
class TaskGraph:
    """Nodes are the tasks, row by row, then the transfers; `before[node]` are those that must end before it begins.

    From one stage to the next on another rank, and back, there is a way of its own for each boundary, on which values follow
    each other in the order in which they are made. Where sends block, the rank at its end has room for one value, from when
    it has arrived until the task that uses it has ended; and a rank begins no task before what the last one made has arrived.
    That is rendezvous with one receive posted ahead on each way, as if a send and its receive were one.
    """

    tasks: list[tuple[int, Task]]  # a rank and what it runs
    transfers: list[Transfer] = field(default_factory=list)
    before: list[list[int]] = field(default_factory=list)

    def node(self, i: int) -> tuple[int, Task] | Transfer:
        """The task or the transfer of a number."""
        return self.tasks[i] if i < len(self.tasks) else self.transfers[i - len(self.tasks)]

    def in_order(self) -> tuple[list[int], list[int]]:
        """All nodes, each behind those that it waits for; and a cycle that leaves the others out, empty where there is none."""
        after: list[list[int]] = [[] for _ in self.before]
        missing = [len(nodes) for nodes in self.before]
        for i, nodes in enumerate(self.before):
            for j in nodes:
                after[j].append(i)
        order = [i for i, count in enumerate(missing) if count == 0]
        for i in order:  # grows while it is read
            for j in after[i]:
                missing[j] -= 1
                if missing[j] == 0:
                    order.append(j)
        if len(order) == len(missing):
            return order, []
        walk = [next(i for i, count in enumerate(missing) if count)]
        while True:  # backwards, from what waits to what it waits for
            before = next(j for j in self.before[walk[-1]] if missing[j])
            if before in walk:
                return order, walk[walk.index(before) :]
            walk.append(before)


Value: TypeAlias = tuple[str, int, int]  # what an action makes: kind ("B" stands for "BW", too), stage, microbatch


def inputs_of(action: Action) -> list[Value]:
    """What an action needs; of stages that are not there at both ends."""
    kind, stage, i = action
    if kind == "F":
        return [("F", stage - 1, i)]
    return [("B", stage, i)] if kind == "W" else [("F", stage, i), ("B", stage + 1, i)]


def task_graph(placement: tuple[int, ...], order: tuple[tuple[Task, ...], ...], blocking: bool) -> TaskGraph:
    """The graph of a schedule in which each action is there once."""
    graph = TaskGraph([(rank, task) for rank, row in enumerate(order) for task in row])
    makers: dict[Value, tuple[int, Action]] = {}  # in the order in which each rank makes them
    for i, (rank, task) in enumerate(graph.tasks):
        graph.before.append([i - 1] if i > 0 and graph.tasks[i - 1][0] == rank else [])
        for action in actions_of(task):
            makers["B" if action.kind == "BW" else action.kind, action.stage, action.microbatch] = i, action
    users: dict[Value, tuple[int, Action]] = {}  # on other ranks
    for i, (rank, task) in enumerate(graph.tasks):
        for action in actions_of(task):
            for value in inputs_of(action):
                if value[1] in (-1, len(placement)):
                    continue
                if placement[value[1]] == rank:
                    graph.before[i].append(makers[value][0])
                else:
                    users[value] = i, action
    last: dict[tuple[int, int], int] = {}  # what a transfer between two stages waits for: the one before it has gone
    for value, (maker, made) in makers.items():
        if value not in users:
            continue
        user, used = users[value]
        node, way = len(graph.before), (made.stage, used.stage)
        graph.transfers.append(Transfer(graph.tasks[maker][0], graph.tasks[user][0], made, used))
        graph.before.append([maker, last[way]] if way in last else [maker])
        graph.before[user].append(node)
        last[way] = user if blocking else node
        if blocking and maker + 1 < len(graph.tasks) and graph.tasks[maker + 1][0] == graph.tasks[maker][0]:
            graph.before[maker + 1].append(node)
    return graph
