"""Rows that nobody asks for are not computed: `take` moves up through everything that treats rows one by one.

A model takes the rows whose logits are wanted before its last norm. What comes after the last layer's attention works on each row
alone, so for a prompt it would be done for every token and thrown away for all but one. Here those instructions are given
the taken rows instead, and the take stands before them. Every backend's program passes through, so no model has to know;
no row's numbers change.
"""

from __future__ import annotations

from quire.backends.recorder import Instruction, Recording, Value

# What a row gives depends on that row alone, and nothing but the number of rows changes; so it is with every elementwise op. Not
# embed, rope and attention: they read the batch's arrays, which are per token.
ROWWISE = frozenset(["norm", "layer_norm", "linear", "adapt", "join", "head_linear", "moe"])


def take_early(recording: Recording) -> Recording:
    """The same program, with each `take` as early as it can be."""
    program = recording.instructions
    late = _only_taken(program, recording.output)
    if not late:
        return recording
    made = {v for i in late.values() for v in i.writes()}
    taken: dict[Value, Value] = {}  # what a value is called once its rows are taken
    for v in made:
        v.per_token, taken[v] = False, v
    renamed = {i.outputs[0]: i.inputs[0] for i in program if i.op == "take" and i.inputs[0] in made}
    out: list[Instruction] = []
    for i in program:
        if i.op == "take" and i.inputs[0] in made:
            continue
        if i.op == "take" and i.inputs[0] in taken:  # by an instruction before this one
            renamed[i.outputs[0]] = taken[i.inputs[0]]
            continue
        if i.op == "take":
            taken[i.inputs[0]] = i.outputs[0]
        elif id(i) in late:
            for v in dict.fromkeys(v for v in i.reads() if v.per_token and v not in taken):
                taken[v] = Value(v.width, per_token=False)
                out.append(Instruction("take", [v], [taken[v]]))
            _rename(i, taken)
        _rename(i, renamed)
        out.append(i)
    return Recording(out, recording.inputs, renamed.get(recording.output, recording.output))


def _only_taken(program: list[Instruction], output: Value) -> dict[int, Instruction]:
    """Instructions (by id) whose results are read only by takes, or by others of these."""
    needed = {output}  # whole, a row per token
    found: dict[int, Instruction] = {}
    for i in reversed(program):
        if i.op == "take":
            continue
        writes = i.writes()
        if (i.op in ROWWISE or i.elementwise is not None) and all(v.per_token and v not in needed for v in writes):
            found[id(i)] = i
        else:
            needed.update(i.reads())
    return found


def _rename(i: Instruction, names: dict[Value, Value]) -> None:
    i.inputs = [names.get(v, v) for v in i.inputs]
    for s in i.segments:
        s.x = names.get(s.x, s.x)
