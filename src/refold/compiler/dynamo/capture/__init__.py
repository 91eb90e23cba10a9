"""Capture loops over time while Dynamo traces them, so that a loop of any length is traced once.

Dynamo (`torch._dynamo.symbolic_convert`) executes a frame's bytecode instruction by instruction on variables that stand
for values, and so a loop's body once per step. Here Dynamo stops at the head of a long loop, and traces the body once
in a graph of its own. The trace begins with a state that stands for every step: the step's number is a symbol, and
carried tensors are placeholders. Lists that grow can be appended to, but not read. If the body leads from that state to
a state of the same form, the trace is the program of every step, by induction. This holds for all steps with the same
decisions on the step's number (`dynamo.induction_variable`). It becomes one `CapturedLoop` in Dynamo's graph, the
variables become its results, and Dynamo goes on after the loop, or at the step that decides otherwise.

In a graph of its own, Dynamo refuses all else that a body may do (sets, new keys, random state, graph breaks). Then the
state is put back, and the loop is traced step by step, as without this package.

===============  ====================================================================================
hook.py          where the interpreter meets loops; which are tried; why others were not captured
fixpoint.py      trace a body until the state it leaves has the form of the state it began with
iterators.py     what a ``for`` goes through, as a function of the step's number
carried.py       what is assumed of the state at every step
locations.py     where the state is kept: variables, attributes, dictionaries, lists
lists.py         the items of lists that grow
trace.py         one trace of the body
side_effects.py  what the body must leave alone
emit.py          the loop as a node, and the state after it
variables.py     Dynamo's variables as this package sees them
===============  ====================================================================================
"""
