"""The small operations on a GPU: norms, rotation, activations, routing, and storing keys and values, each in one launch or two.

All arithmetic is in fp32. What bounds each is memory, or with few tokens the latency of a launch: a row is read once, kept in
registers and written once.

Routing is two launches. The first multiplies tokens by the gate, cut along the hidden size where there are few tokens; the
second adds the cuts, scores and chooses. Experts whose scores nearly tie must not change places, so the product is as exact as
one in fp32, yet on the tensor cores: an fp32 number is the sum of three bf16 numbers (24 bits in three times 8), an fp16 number
of two, and of the products of those parts the ones above 2^-24 are added (as in arXiv 1904.06376).
"""

from __future__ import annotations

from eightfold.kernels.jit import kernel, launch_dependents, tl, wait_for_predecessor


@kernel("num_rows")
def rms_norm_kernel(
    x_ptr: tl.tensor,
    other_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    x_outer: tl.tensor,
    x_inner: tl.tensor,
    other_outer: tl.tensor,
    eps: tl.tensor,
    mode: tl.constexpr,
    inner: tl.constexpr,
    size: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """`rows` rows: out = v / sqrt(mean(v²) + eps) * weight, by `mode` with v = x ("plain"), x + other, which is also written to
    other ("add"), or x * silu(other) ("gated").

    Row r is `size` values at x[r // inner * x_outer + r % inner * x_inner]. Shapes: out `[num_rows, size]`, weight `[size]`, or
    `[inner * size]` where gated, other like x with neighbouring rows of an outer one beside each other.
    """
    if overlap:
        launch_dependents()
        wait_for_predecessor()
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    offsets = tl.arange(0, block)
    valid = (row < num_rows)[:, None] & (offsets < size)[None, :]
    outer = (row // inner).to(tl.int64)
    within = row % inner
    x = tl.load(x_ptr + (outer * x_outer + within * x_inner)[:, None] + offsets[None, :], mask=valid, other=0.0).to(tl.float32)
    other = other_ptr + (outer * other_outer + within * size)[:, None] + offsets[None, :]
    if mode == "add":
        total = (x + tl.load(other, mask=valid, other=0.0).to(tl.float32)).to(other_ptr.dtype.element_ty)
        tl.store(other, total, mask=valid)
        x = total.to(tl.float32)
    if mode == "gated":
        gate = tl.load(other, mask=valid, other=0.0).to(tl.float32)
        x *= gate * tl.sigmoid(gate)
        weight = tl.load(weight_ptr + (within * size)[:, None] + offsets[None, :], mask=valid, other=0.0)
    else:
        weight = tl.load(weight_ptr + offsets, mask=offsets < size, other=0.0)[None, :]
    out = x * tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)[:, None] * weight.to(tl.float32)
    out_rows = out_ptr + row.to(tl.int64)[:, None] * size + offsets[None, :]
    tl.store(out_rows, out.to(out_ptr.dtype.element_ty), mask=valid)


@kernel()
def rotate_heads(
    x_ptr: tl.tensor,
    head: tl.tensor,
    num_heads: tl.constexpr,
    stride: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    half: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Rotate heads of one token in place: x_ptr is its first head, the next ones are `stride` apart; cos and sin `[block]`."""
    offsets = tl.arange(0, block)
    valid = (head < num_heads)[:, None] & (offsets < half)[None, :]
    place = x_ptr + (head * stride)[:, None] + offsets[None, :]
    first = tl.load(place, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=valid, other=0.0).to(tl.float32)
    tl.store(place, (first * cos - second * sin).to(x_ptr.dtype.element_ty), mask=valid)
    tl.store(place + half, (second * cos + first * sin).to(x_ptr.dtype.element_ty), mask=valid)


@kernel()
def rotary_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_stride: tl.tensor,
    k_head_stride: tl.tensor,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    half: tl.constexpr,
    heads: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """`heads` query or key heads of one token, rotated in place.

    Shapes: q `[T, num_heads, D]`, k `[T, num_kv_heads, D]`, cos_sin `float32 [max_position, 2 * half]`, positions `int64 [T]`.
    """
    if overlap:
        launch_dependents()
        wait_for_predecessor()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    offsets = tl.arange(0, block)
    angles = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * half) + offsets
    cos = tl.load(angles, mask=offsets < half, other=0.0)[None, :]
    sin = tl.load(angles + half, mask=offsets < half, other=0.0)[None, :]
    query_parts: tl.constexpr = (num_heads + heads - 1) // heads
    head = tl.arange(0, heads)
    if part < query_parts:
        rotate_heads(q_ptr + token * q_stride, part * heads + head, num_heads, q_head_stride, cos, sin, half, block)
    else:
        head += (part - query_parts) * heads
        rotate_heads(k_ptr + token * k_stride, head, num_kv_heads, k_head_stride, cos, sin, half, block)


@kernel()
def activation_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_stride: tl.tensor,
    size: tl.constexpr,
    gated: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """Part of one row: y = silu(x[:size]) * x[size:] where gated, else max(x, 0)². Shapes: x `[T, ...]`, y `[T, size]`."""
    if overlap:
        launch_dependents()
        wait_for_predecessor()
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * block + tl.arange(0, block)
    valid = offsets < size
    x_row = x_ptr + row * x_stride + offsets
    x = tl.load(x_row, mask=valid, other=0.0).to(tl.float32)
    if gated:
        y = x * tl.sigmoid(x) * tl.load(x_row + size, mask=valid, other=0.0).to(tl.float32)
    else:
        y = tl.where(x < 0.0, 0.0, x * x)
    tl.store(y_ptr + row * size + offsets, y.to(y_ptr.dtype.element_ty), mask=valid)


@kernel()
def write_kv_kernel(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    size: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One token: its `size` values of key and of value, to its slot of the caches `[num_slots, size]`; slots `int64 [T]`."""
    if overlap:
        launch_dependents()
        wait_for_predecessor()
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, block)
    valid = offsets < size
    slot = tl.load(slots_ptr + token)
    key = tl.load(key_ptr + token * key_stride + offsets, mask=valid, other=0.0)
    value = tl.load(value_ptr + token * value_stride + offsets, mask=valid, other=0.0)
    tl.store(key_cache_ptr + slot * size + offsets, key, mask=valid)
    tl.store(value_cache_ptr + slot * size + offsets, value, mask=valid)


@kernel()
def bf16_part(x: tl.tensor, taken: tl.constexpr) -> tl.tensor:
    """The next bf16 number of the sum that x (fp32) is, after `taken` of them."""
    for _ in tl.static_range(taken):
        x -= x.to(tl.bfloat16).to(tl.float32)
    return x.to(tl.bfloat16)


@kernel("num_tokens")
def gate_kernel(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    num_tokens: tl.tensor,
    x_stride: tl.tensor,
    num_experts: tl.constexpr,
    hidden: tl.constexpr,
    cut_k: tl.constexpr,
    x_parts: tl.constexpr,
    gate_parts: tl.constexpr,
    block_t: tl.constexpr,
    block_e: tl.constexpr,
    block_k: tl.constexpr,
    native: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """A tile of one cut: logits[c, t, e] = sum of x[t, k] gate[e, k] over k of the cut, exact to fp32.

    Shapes: x `[T, hidden]` with rows `x_stride` apart, gate `[E, hidden]`, logits `float32 [cuts, T, E]`; a cut is `cut_k`
    of k. Where not `native`, it is a plain fp32 product, and parts do not count.
    """
    if overlap:
        launch_dependents()
        wait_for_predecessor()
    token = tl.program_id(0) * block_t + tl.arange(0, block_t)
    expert = tl.program_id(1) * block_e + tl.arange(0, block_e)
    cut = tl.program_id(2)
    offs_k = tl.arange(0, block_k)
    x_rows = x_ptr + token.to(tl.int64)[:, None] * x_stride + offs_k[None, :]
    gate_rows = gate_ptr + expert[:, None] * hidden + offs_k[None, :]
    acc = tl.zeros((block_t, block_e), dtype=tl.float32)
    for k in range(cut * cut_k, tl.minimum((cut + 1) * cut_k, hidden), block_k):
        k_valid = (offs_k < hidden - k)[None, :]
        x = tl.load(x_rows + k, mask=(token < num_tokens)[:, None] & k_valid, other=0.0).to(tl.float32)
        gate = tl.load(gate_rows + k, mask=(expert < num_experts)[:, None] & k_valid, other=0.0).to(tl.float32)
        added = tl.zeros((block_t, block_e), dtype=tl.float32)
        if native:
            # Smaller products first: part i of x times part j of the gate is of size 2^(-8 (i + j)).
            for order in tl.static_range(2, -1, -1):
                for i in tl.static_range(x_parts):
                    if order - i >= 0 and order - i < gate_parts:
                        added = tl.dot(bf16_part(x, i), bf16_part(gate, order - i).trans(1, 0), added)
        else:
            added = tl.dot(x, gate.trans(1, 0), added, input_precision="ieee")
        # A tensor core truncates its sums, so it gets no long ones. A plain sum would be made one with the products above.
        acc = tl.fma(added, 1.0, acc)
    place = (cut.to(tl.int64) * num_tokens + token)[:, None] * num_experts + expert[None, :]
    tl.store(logits_ptr + place, acc, mask=(token < num_tokens)[:, None] & (expert < num_experts)[None, :])


@kernel("num_tokens")
def choose_kernel(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    num_tokens: tl.tensor,
    scale: tl.tensor,
    cuts: tl.constexpr,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    sigmoid: tl.constexpr,
    biased: tl.constexpr,
    normalize: tl.constexpr,
    num_groups: tl.constexpr,
    topk_groups: tl.constexpr,
    groups: tl.constexpr,
    members: tl.constexpr,
    slots: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One token: experts and their weights by the formulas of `Routing`; of equal ones the lower id wins.

    Shapes: logits `float32 [cuts, T, E]`, bias `float32 [E]`, ids `int64 [T, top_k]`, weights `float32 [T, top_k]`. Groups,
    their members and top_k are padded to powers of two: groups, members, slots.
    """
    if overlap:
        launch_dependents()
        wait_for_predecessor()
    token = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = num_experts // num_groups
    group = tl.arange(0, groups)
    member = tl.arange(0, members)
    expert = group[:, None] * size + member[None, :]
    valid = (group < num_groups)[:, None] & (member < size)[None, :]
    logits = tl.zeros((groups, members), dtype=tl.float32)
    for cut in tl.static_range(cuts):
        row = logits_ptr + (num_tokens.to(tl.int64) * cut + token) * num_experts
        logits += tl.load(row + expert, mask=valid, other=0.0)
    if sigmoid:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        logits = tl.where(valid, logits, float("-inf"))
        scores = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
        scores = scores / tl.sum(tl.sum(scores, axis=1), axis=0)
    choice = scores
    if biased:
        choice += tl.load(bias_ptr + expert, mask=valid, other=0.0)
    choice = tl.where(valid, choice, float("-inf"))
    expert = tl.where(valid, expert, num_experts)
    if num_groups > 1:
        best = tl.max(choice, axis=1)
        first = tl.min(tl.where(choice == best[:, None], member[None, :], members), axis=1)
        standing = best + tl.max(tl.where(member[None, :] == first[:, None], float("-inf"), choice), axis=1)
        kept = group < 0
        for _ in range(topk_groups):
            found = tl.min(tl.where(standing == tl.max(standing, axis=0), group, groups), axis=0)
            kept = kept | (group == found)
            standing = tl.where(group == found, float("-inf"), standing)
        choice = tl.where(kept[:, None], choice, float("-inf"))
    choice = tl.reshape(choice, (groups * members,))
    scores = tl.reshape(scores, (groups * members,))
    expert = tl.reshape(expert, (groups * members,))
    slot = tl.arange(0, slots)
    ids = tl.zeros((slots,), dtype=tl.int32)
    weights = tl.zeros((slots,), dtype=tl.float32)
    for index in range(top_k):
        found = tl.min(tl.where(choice == tl.max(choice, axis=0), expert, num_experts), axis=0)
        is_found = expert == found
        ids = tl.where(slot == index, tl.minimum(found, num_experts - 1), ids)
        weights = tl.where(slot == index, tl.sum(tl.where(is_found, scores, 0.0), axis=0), weights)
        choice = tl.where(is_found, float("-inf"), choice)
    if normalize:
        weights = weights / (tl.sum(weights, axis=0) + (1e-20 if sigmoid else 0.0))
    tl.store(ids_ptr + token * top_k + slot, ids.to(tl.int64), mask=slot < top_k)
    tl.store(weights_ptr + token * top_k + slot, weights * scale, mask=slot < top_k)
