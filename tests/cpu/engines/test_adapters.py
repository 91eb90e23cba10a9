"""What plugins compute, in layouts of the engines, against the float64 definitions: slots, packs, several tokens."""

import pytest
import torch
import torch.nn.functional as F

from refold.engines import adapters
from refold.errors import BackendUnsupported
from refold.ops.delta_rule.reference import delta_rule as delta
from refold.ops.selective_scan.reference import selective_scan as scan
from refold.ops.ssd.reference import ssd

h, p, g, n, d = 4, 3, 2, 5, 6
OFFSETS = torch.tensor([0, 4, 4, 5, 11], dtype=torch.int32)  # the second is empty
SLOTS = torch.tensor([5, 2, 7, 1], dtype=torch.int32)
NULL = 0


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def pool(slots, *shape):
    """A pool whose slots are apart in memory, as engines keep layers in one block."""
    return rand(slots, 2, *shape)[:, 1]


def close(found, expected):
    expected = torch.as_tensor(expected)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 4096 * torch.finfo(torch.float64).eps * expected.abs().max()


def run(reference, tokens, state, **rest):
    """A definition on one sequence: tokens (t, ...), state (...)."""
    tokens = {k: None if v is None else v[None].numpy() for k, v in tokens.items()}
    rest = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in rest.items()}
    y, after = reference(**tokens, **rest, initial_state=None if state is None else state[None].numpy())
    return torch.as_tensor(y[0]), torch.as_tensor(after[0])


def mamba2(t):
    tokens = {"x": rand(t, h, p), "dt": rand(t, h), "B": rand(t, g, n), "C": rand(t, g, n), "z": rand(t, h, p)}
    return tokens, {"A": -rand(h).exp(), "D": rand(h), "dt_bias": rand(h), "dt_softplus": True}


def mamba1(t):
    tokens = {"x": rand(t, d), "dt": rand(t, d), "B": rand(t, n), "C": rand(t, n), "z": rand(t, d)}
    return tokens, {"A": -rand(d, n).exp(), "D": rand(d), "dt_bias": rand(d), "dt_softplus": True}


def spans(offsets=OFFSETS):
    return list(zip(offsets.tolist(), offsets.tolist()[1:], strict=False))


def part(tokens, start, end):
    return {k: None if v is None else v[start:end] for k, v in tokens.items()}


@pytest.mark.parametrize("initial", [False, True])
def test_prefill_of_mamba2_writes_outputs_and_slots(initial):
    tokens, rest = mamba2(11)
    states, before = pool(9, h, p, n), rand(4, h, p, n) if initial else None
    old, out = states.clone(), torch.full((11, h, p), torch.nan, dtype=torch.float64)
    found = adapters.chunk_scan_varlen(
        **tokens, **rest, chunk_size=4, cu_seqlens=OFFSETS, cu_chunk_seqlens=OFFSETS, last_chunk_indices=None,
        seq_idx=None, out=out, initial_states=before, final_states_out=states, final_state_indices=SLOTS,
    )  # fmt: skip
    assert found is None
    for row, (start, end) in enumerate(spans()):
        state = before[row] if initial else torch.zeros(h, p, n, dtype=torch.float64)
        if end > start:
            y, state = run(ssd, part(tokens, start, end), state, **rest)
            close(out[start:end], y)
        close(states[SLOTS[row]], state)
    others = [slot for slot in range(9) if slot not in SLOTS.tolist()]
    assert torch.equal(states[others], old[others])


@pytest.mark.parametrize("initial", [False, True])
def test_prefill_of_mamba2_with_a_batch_axis_returns_the_states_of_prompts(initial):
    tokens, rest = mamba2(11)
    before, out = rand(4, h, p, n) if initial else None, torch.empty(1, 11, h, p, dtype=torch.float64)
    wanted = {"return_varlen_states": True, "return_track_states": True}
    given = {**{k: v[None] for k, v in tokens.items()}, **rest, "chunk_size": 4, "out": out, "cu_seqlens": OFFSETS}
    inside, states, tracked = adapters.chunk_scan_packed(**given, **wanted, initial_states=before)
    assert inside is tracked is None
    for row, (start, end) in enumerate(spans()):
        state = before[row] if initial else torch.zeros(h, p, n, dtype=torch.float64)
        if end > start:
            y, state = run(ssd, part(tokens, start, end), state, **rest)
            close(out[0, start:end], y)
        close(states[row], state)
    at = torch.tensor([2])
    for other in ({}, {**wanted, "track_end_locs": at, "track_seq_idx": at}, {**wanted, "return_final_states": True}):
        with pytest.raises(BackendUnsupported):
            adapters.chunk_scan_packed(**given, **other)


@pytest.mark.parametrize("initial", [False, True])
def test_prefill_of_mamba2_returns_the_states_after_chunks(initial):
    tokens, rest = mamba2(11)
    rest["dt_limit"] = (0.2, 0.9)
    offsets, chunks = torch.tensor([0, 5, 5, 11]), torch.tensor([0, 4, 5, 8, 11])
    prompt = torch.tensor([0, 0, 2, 2])  # the second is empty
    before, out = rand(3, h, p, n) if initial else None, torch.empty(11, h, p, dtype=torch.float64)
    found = adapters.chunk_scan_varlen(
        **tokens, **rest, chunk_size=4, cu_seqlens=offsets, cu_chunk_seqlens=chunks, last_chunk_indices=None,
        seq_idx=prompt, out=out, initial_states=before, return_intermediate_states=True, state_dtype=torch.float64,
    )  # fmt: skip
    for chunk, end in enumerate(chunks.tolist()[1:]):
        row = int(prompt[chunk])
        y, state = run(ssd, part(tokens, offsets[row], end), before[row] if initial else None, **rest)
        close(found[chunk], state)
        close(out[offsets[row] : end], y)


@pytest.mark.parametrize("gated", [False, True])
def test_prefill_of_mamba1_goes_on_from_slots_in_place(gated):
    tokens, rest = mamba1(11)
    if not gated:
        tokens["z"] = None
    states, goes_on = pool(9, d, n), torch.tensor([True, True, False, True])
    slots = torch.tensor([5, 2, 7, NULL], dtype=torch.int32)  # the last is padding
    old, expected = states.clone(), states.clone()
    turned = {k: None if v is None else v.T.contiguous() for k, v in tokens.items()}
    found = adapters.selective_scan_varlen(
        turned["x"], states, turned["dt"], rest["A"], turned["B"][None], turned["C"][None], rest["D"], turned["z"],
        rest["dt_bias"], delta_softplus=True, query_start_loc=OFFSETS, cache_indices=slots, has_initial_state=goes_on,
    )  # fmt: skip
    assert found is turned["z" if gated else "dt"]
    for row, (start, end) in enumerate(spans()[:3]):
        state = old[slots[row]] * goes_on[row]
        if end > start:
            y, state = run(scan, part(tokens, start, end), state, **rest)
            close(found[:, start:end], y.T)
        expected[slots[row]] = state
    close(states, expected)


@pytest.mark.parametrize("missing", ["query_start_loc", "blocks"])
def test_prefill_of_mamba1_leaves_other_calls_to_the_engine(missing):
    x, more = rand(d, 3), {"query_start_loc": torch.tensor([0, 3]), "cache_indices": torch.tensor([1])}
    more = {} if missing == "query_start_loc" else {**more, "block_idx_last_scheduled_token": torch.tensor([1])}
    states = pool(3, d, n)
    old = states.clone()
    with pytest.raises(BackendUnsupported):
        adapters.selective_scan_varlen(x, states, x, rand(d, n), rand(n, 3), rand(n, 3), **more)
    assert torch.equal(states, old)


def decoded(kind, t):
    """Tokens of a kind of layer and its parameters, as its decode has them; the definition; the shape of a state."""
    if kind == "mamba1":
        tokens, rest = mamba1(t)
        return tokens, rest, tokens, {k: rest[k] for k in ("A", "D", "dt_bias", "dt_softplus")}, scan, (d, n)
    tokens, rest = mamba2(t)
    wide = {**tokens, "dt": tokens["dt"][..., None].expand(-1, -1, p)}
    given = {"A": rest["A"][:, None, None].expand(h, p, n), "dt_softplus": True}
    given |= {name: rest[name][:, None].expand(h, p) for name in ("D", "dt_bias")}
    return tokens, rest, wide, given, ssd, (h, p, n)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_decode_reads_a_slot_and_writes_that_or_another(kind, elsewhere):
    tokens, rest, wide, given, reference, shape = decoded(kind, 4)
    states, source = pool(9, *shape), torch.tensor([5, NULL, 7, 1], dtype=torch.int32)
    target = torch.tensor([6, 3, 5, 8], dtype=torch.int32) if elsewhere else source  # 5 is read and written
    expected, out = states.clone(), torch.empty_like(tokens["x"])
    old = states.clone()
    adapters.state_update(
        states, **wide, **given, state_batch_indices=source[:, None], out=out, null_block_id=NULL,
        dst_state_batch_indices=target if elsewhere else None,
    )  # fmt: skip
    for row in (0, 2, 3):
        y, state = run(reference, part(tokens, row, row + 1), old[source[row]], **rest)
        close(out[row], y[0])
        expected[target[row]] = state
    close(states, expected)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_decode_of_several_tokens_goes_on_from_the_accepted_one_and_keeps_each_state(kind):
    tokens, rest, wide, given, reference, shape = decoded(kind, 9)
    offsets = torch.tensor([0, 3, 3, 5, 8], dtype=torch.int32)  # the last token is padding
    slots = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [NULL, 10, 11]], dtype=torch.int32)
    accepted = torch.tensor([2, 1, 0, 1], dtype=torch.int32)
    states = pool(12, *shape)
    old, expected, out = states.clone(), states.clone(), torch.full_like(tokens["x"], 7.0)
    adapters.state_update(
        states, **wide, **given, state_batch_indices=slots, num_accepted_tokens=accepted, cu_seqlens=offsets, out=out,
        null_block_id=NULL,
    )  # fmt: skip
    for row, begin in ((0, 2), (2, 7)):
        start, end = spans(offsets)[row]
        for token in range(start, end):
            y, state = run(reference, part(tokens, start, token + 1), old[begin], **rest)
            close(out[token], y[-1])
            expected[slots[row, token - start]] = state
    close(states, expected)
    assert (out[8] == 7).all()


def test_decode_of_packed_tokens_without_counts_writes_the_last_state():
    tokens, rest, wide, given, reference, shape = decoded("mamba2", 5)
    offsets, slots, states = torch.tensor([0, 3, 3, 5]), torch.tensor([1, 2, 3]), pool(4, *shape)
    old, expected, out = states.clone(), states.clone(), torch.empty_like(tokens["x"])
    adapters.state_update(states, **wide, **given, state_batch_indices=slots, cu_seqlens=offsets, out=out)
    for row in (0, 2):
        start, end = spans(offsets)[row]
        y, expected[slots[row]] = run(reference, part(tokens, start, end), old[slots[row]], **rest)
        close(out[start:end], y)
    close(states, expected)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_decode_without_destinations_has_negative_padding(kind):
    tokens, rest, wide, given, reference, shape = decoded(kind, 3)
    states, slots = pool(9, *shape), torch.tensor([5, -1, 0], dtype=torch.int32)
    old, expected, out = states.clone(), states.clone(), torch.empty_like(tokens["x"])
    call = {**wide, **given, "state_batch_indices": slots, "out": out}
    with pytest.raises(BackendUnsupported, match="drafts"):
        adapters.slot_update(states, **call, disable_state_update=True)
    assert torch.equal(states, old)
    adapters.slot_update(states, **call)
    for row in (0, 2):
        y, state = run(reference, part(tokens, row, row + 1), old[slots[row]], **rest)
        close(out[row], y[0])
        expected[slots[row]] = state
    close(states, expected)


def gated(t):
    tokens = {"q": rand(t, g, n), "k": rand(t, g, n), "v": rand(t, h, p)}
    return {**tokens, "g": -rand(t, h).exp(), "beta": rand(t, h).sigmoid()}


def test_prefill_of_the_gated_delta_rule_has_values_first():
    tokens, before = gated(11), rand(4, h, p, n)
    front = torch.full((13, h * p), torch.nan, dtype=torch.float64)
    o, states = adapters.gated_delta_prefill(
        **{k: v[None] for k, v in tokens.items()}, initial_state=before, output_final_state=True, cu_seqlens=OFFSETS,
        core_attn_out=front,
    )  # fmt: skip
    for row, (start, end) in enumerate(spans()):
        state = before[row]
        if end > start:
            y, after = run(delta, part(tokens, start, end), state.mT, normalize=True)
            state = after.mT
            close(o[0, start:end], y)
        close(states[row], state)
    assert torch.equal(front[:11].view(11, h, p), o[0])
    assert front[11:].isnan().all()


@pytest.mark.parametrize("inplace", [False, True])
def test_extend_of_the_gated_delta_rule_uses_slots(inplace):
    tokens, states = gated(11), pool(9, h, p, n)
    slots = torch.tensor([5, 2, -1, 1])
    old, expected = states.clone(), states.clone()
    o = adapters.gated_delta_extend(
        **{k: v[None] for k, v in tokens.items()}, ssm_states=states, cache_indices=slots, query_start_loc=OFFSETS,
        inplace_update=inplace,
    )  # fmt: skip
    for row in (0, 3):
        start, end = spans()[row]
        y, after = run(delta, part(tokens, start, end), old[slots[row]].mT, normalize=True)
        close(o[0, start:end], y)
        if inplace:
            expected[slots[row]] = after.mT
    close(states, expected)


def test_decode_of_the_gated_delta_rule_uses_slots():
    tokens, states, slots = gated(3), pool(9, h, p, n), torch.tensor([5, -1, 7])
    a, b, A_log, bias = rand(3, h), rand(3, h), rand(h), rand(h)
    old, expected = states.clone(), states.clone()
    heads = {name: tokens[name][None] for name in "qkv"}
    more = {"A_log": A_log, "dt_bias": bias, "ssm_states": states, "cache_indices": slots}
    o = adapters.gated_delta_decode(**heads, a=a, b=b, **more, query_start_loc=torch.arange(4))
    tokens["g"], tokens["beta"] = -A_log.exp() * F.softplus(a + bias), b.sigmoid()
    for row in (0, 2):
        y, after = run(delta, part(tokens, row, row + 1), old[slots[row]].mT, normalize=True)
        close(o[0, row], y[0])
        expected[slots[row]] = after.mT
    close(states, expected)
    with pytest.raises(BackendUnsupported, match="one token a sequence"):
        adapters.gated_delta_decode(**heads, a=a, b=b, **more, query_start_loc=torch.tensor([0, 3]))


def kimi(t, bound):
    """Tokens with a key's own decays; the gates that these come from."""
    tokens = {name: rand(t, h, p if name == "v" else n) for name in "qkv"}
    gates = {"g": rand(t, h, n), "beta": rand(t, h), "A_log": rand(h), "dt_bias": rand(h * n)}
    x, rate = gates["g"] + gates["dt_bias"].view(h, n), gates["A_log"].exp()[:, None]
    decay = -rate * F.softplus(x) if bound is None else bound * (rate * x).sigmoid()
    return {**tokens, "g": decay, "beta": gates["beta"].sigmoid()}, gates


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("raw", [False, True])
def test_extend_of_kimi_delta_attention_uses_slots(bound, raw):
    tokens, gates = kimi(11, bound)
    states, slots = pool(9, h, p, n), torch.tensor([5, 2, -1, 1])
    old, expected = states.clone(), states.clone()
    given = {**tokens, **({"g": gates["g"], "beta": gates["beta"]} if raw else {})}
    rest = {"A_log": gates["A_log"], "dt_bias": gates["dt_bias"], "lower_bound": bound, "beta_is_raw": True}
    places = {"ssm_states": states, "cache_indices": slots, "query_start_loc": OFFSETS}
    o = adapters.kimi_delta_extend(**{k: v[None] for k, v in given.items()}, **places, **(rest if raw else {}))
    for row in (0, 3):
        start, end = spans()[row]
        y, after = run(delta, part(tokens, start, end), old[slots[row]].mT, normalize=True)
        close(o[0, start:end], y)
        expected[slots[row]] = after.mT
    close(states, expected)
    with pytest.raises(BackendUnsupported, match="inside prompts"):
        adapters.kimi_delta_extend(*(v[None] for v in given.values()), **places, return_intermediate_states=True)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_decode_of_kimi_delta_attention_uses_slots(bound):
    tokens, gates = kimi(3, bound)
    states, slots = pool(9, h, p, n), torch.tensor([5, -1, 7])
    old, expected = states.clone(), states.clone()
    o = adapters.kimi_delta_decode(
        *(tokens[name][None] for name in "qkv"), a=gates["g"].flatten(1), b=gates["beta"][None],
        A_log=gates["A_log"].view(1, 1, h, 1), dt_bias=gates["dt_bias"], lower_bound=bound, ssm_states=states,
        cache_indices=slots, query_start_loc=torch.arange(4),
    )  # fmt: skip
    for row in (0, 2):
        y, after = run(delta, part(tokens, row, row + 1), old[slots[row]].mT, normalize=True)
        close(o[0, row], y[0])
        expected[slots[row]] = after.mT
    close(states, expected)


def test_sixteen_bit_tokens_and_states_keep_their_dtypes():
    def half(v):
        return v.bfloat16() if isinstance(v, torch.Tensor) else v

    tokens, rest = mamba2(11)
    states, out = pool(9, h, p, n).bfloat16(), torch.empty(11, h, p, dtype=torch.bfloat16)
    adapters.chunk_scan_varlen(
        **{k: half(v) for k, v in tokens.items()}, **{k: v if v is True else v.float() for k, v in rest.items()},
        chunk_size=4, cu_seqlens=OFFSETS, cu_chunk_seqlens=OFFSETS, last_chunk_indices=None, seq_idx=None, out=out,
        initial_states=rand(4, h, p, n).bfloat16(), final_states_out=states, final_state_indices=SLOTS,
    )  # fmt: skip
    tokens = gated(11)
    mixed = {k: half(v)[None] if k in "qkv" else v.float()[None] for k, v in tokens.items()}
    o = adapters.gated_delta_extend(**mixed, ssm_states=states, cache_indices=SLOTS, query_start_loc=OFFSETS)
    assert o.dtype == out.dtype == torch.bfloat16
    assert states.isfinite().all()
