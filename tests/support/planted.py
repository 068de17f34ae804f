"""Implementations with one bug each, and the right ones they were made from. The checker must tell them apart.

The right ones are jitted: a program for each shape is compiled faster than all its operations one by one.
"""

import functools

import jax
import jax.numpy as jnp


def _logits(hidden, weight, bias):
    upcast = (x.astype(jnp.float32) for x in (hidden, weight, bias))
    hidden, weight, bias = upcast
    return jnp.matmul(hidden, weight.T, precision="highest") + bias


def _taken(logits, ids):
    """log-softmax of float32 logits at the ids, or NaN at a bad id."""
    vocab = logits.shape[-1]
    good = (ids >= 0) & (ids < vocab)
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.where(good, ids, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(good, found, jnp.nan)


@jax.jit
def logp(logits, token_ids):
    return _taken(logits.astype(jnp.float32), token_ids)


@jax.jit
def linear_logp(hidden, weight, ids, bias):
    return _taken(_logits(hidden, weight, bias), ids)


def _are_allowed(words, columns):
    """Whether each row of words allows each of these columns."""
    return (words[..., columns // 32] >> (columns % 32).astype(jnp.uint32)) & 1 != 0


@jax.jit
def masked_linear_logp(hidden, weight, ids, bias, *, allowed_mask):
    allowed = _are_allowed(allowed_mask, jnp.arange(len(weight)))
    found = _taken(jnp.where(allowed, _logits(hidden, weight, bias), -jnp.inf), ids)
    return jnp.where(jnp.isinf(found), jnp.nan, found)


def mask_left_out(*arrays, allowed_mask):
    return linear_logp(*arrays)


@jax.jit
def mask_shifted_by_a_word(*arrays, allowed_mask):
    """Every token of a row is looked up in the next word, but for the target, which stays allowed."""
    target, words = arrays[2][..., None], jnp.arange(allowed_mask.shape[-1])
    bit = jnp.where(words == target // 32, jnp.uint32(1) << (target % 32).astype(jnp.uint32), 0)
    return masked_linear_logp(*arrays, allowed_mask=jnp.roll(allowed_mask, -1, axis=-1) | bit)


@jax.jit
def bits_behind_the_vocabulary_counted(hidden, weight, ids, bias, *, allowed_mask):
    """The head is padded with zeros up to whole words, and bits of the mask let them count."""
    behind = -len(weight) % 32
    weight, bias = jnp.pad(weight, ((0, behind), (0, 0))), jnp.pad(bias, (0, behind))
    return masked_linear_logp(hidden, weight, ids, bias, allowed_mask=allowed_mask)


@jax.custom_vjp
def _with_gradients_of_every_token(hidden, weight, ids, bias, words):
    return masked_linear_logp(hidden, weight, ids, bias, allowed_mask=words)


def _gradients_of_every_token(saved, g):
    hidden, weight, ids, bias, _ = saved
    d_hidden, d_weight, d_bias = jax.vjp(lambda h, w, b: linear_logp(h, w, ids, b), hidden, weight, bias)[1](g)
    return d_hidden, d_weight, None, d_bias, None


_with_gradients_of_every_token.defvjp(lambda *x: (_with_gradients_of_every_token(*x), x), _gradients_of_every_token)


def gradient_to_tokens_that_are_not_allowed(*arrays, allowed_mask):
    return _with_gradients_of_every_token(*arrays, allowed_mask)


@jax.jit
def mask_added_to_logits(hidden, weight, ids, bias, *, allowed_mask):
    """−1e9 is added to the logits of other tokens, so that a logit of NaN stays one."""
    allowed = _are_allowed(allowed_mask, jnp.arange(len(weight)))
    return _taken(_logits(hidden, weight, bias) + jnp.where(allowed, 0.0, -1e9), ids)


_RETURNS = ("return_lse", "return_entropy", "return_top_k", "return_target_rank")


@functools.partial(jax.jit, static_argnames=(*_RETURNS, "bug"))
def _ranked_linear_logp(
    hidden, weight, ids, bias, *, return_lse, return_entropy, return_top_k, return_target_rank, bug=None
):
    logits, columns = _logits(hidden, weight, bias), jnp.arange(len(weight))
    good = (ids >= 0) & (ids < len(weight))
    lse = jnp.where(good, jax.nn.logsumexp(logits, axis=-1), jnp.nan)
    log_p = logits - lse[..., None]
    p = jnp.exp(log_p)
    entropy = -(p * jnp.where(p == 0, 0, log_p)).sum(axis=-1)

    z = jax.lax.stop_gradient(logits)
    searched = z[..., : len(weight) // 128 * 128] if bug == "whole tiles" else z
    if bug == "higher ids first":
        top_ids = searched.shape[-1] - 1 - jax.lax.top_k(searched[..., ::-1], return_top_k)[1]
    else:
        top_ids = jax.lax.top_k(searched, return_top_k)[1]
    top = jnp.take_along_axis(z, top_ids, axis=-1)
    top_logps = top if bug == "logits" else jax.lax.stop_gradient(top - lse[..., None])
    top_ids = jnp.where((top > -jnp.inf) | (bug == "impossible tokens"), top_ids, -1)
    top_ids = jnp.where(good[..., None] | (bug == "bad rows"), top_ids, -1)

    target = jnp.take_along_axis(z, ids[..., None] % len(weight), axis=-1)
    is_earlier = columns != ids[..., None] if bug == "all equal logits" else columns < ids[..., None]
    rank = ((z > target) | ((z == target) & is_earlier)).sum(axis=-1) + (bug == "from 1")
    return _taken(logits, ids), lse, entropy, top_ids, top_logps, jnp.where(good, rank, -1)


def ranked_linear_logp(*arrays, **options):
    return _ranked_linear_logp(*arrays, **options)


last_tile_not_searched = functools.partial(_ranked_linear_logp, bug="whole tiles")
higher_ids_first = functools.partial(_ranked_linear_logp, bug="higher ids first")
logits_for_log_probs = functools.partial(_ranked_linear_logp, bug="logits")
impossible_tokens_listed = functools.partial(_ranked_linear_logp, bug="impossible tokens")
bad_rows_ranked = functools.partial(_ranked_linear_logp, bug="bad rows")
equal_logits_before_the_target = functools.partial(_ranked_linear_logp, bug="all equal logits")
rank_from_1 = functools.partial(_ranked_linear_logp, bug="from 1")


@functools.partial(jax.jit, static_argnames=("kind", "beta", "frozen"))
def _linear_kl(h, w, th, tw, b, tb, *, kind, beta, temperature, teacher_temperature, frozen=True):
    a = jax.nn.log_softmax(_logits(h, w, b) / temperature)
    q = jax.nn.log_softmax(_logits(th, tw, tb) / teacher_temperature)
    q = jax.lax.stop_gradient(q) if frozen else q

    def kl(one, other):
        return (jnp.exp(one) * (one - other)).sum(axis=-1)

    if kind != "jsd":
        return kl(q, a) if kind == "forward" else kl(a, q)
    m = jnp.logaddexp(q + jnp.log(beta), a + jnp.log1p(-beta))
    return beta * kl(q, m) + (1 - beta) * kl(a, m)


def linear_kl(*arrays, **options):
    return _linear_kl(*arrays, **options)


def swapped_student_and_teacher(h, w, th, tw, b, tb, **options):
    """The kinds of KL are taken for one another, and the mixture has the wrong shares."""
    kind = {"forward": "reverse", "reverse": "forward"}.get(options["kind"], "jsd")
    return _linear_kl(h, w, th, tw, b, tb, **options | {"kind": kind, "beta": 1 - options["beta"]})


def teacher_at_the_students_temperature(*arrays, **options):
    return _linear_kl(*arrays, **options | {"teacher_temperature": options["temperature"]})


def teacher_that_learns(*arrays, **options):
    return _linear_kl(*arrays, **options, frozen=False)


@functools.partial(jax.jit, static_argnames=("kind", "beta", "bug"))
def _listed_kl(hidden, weight, *, teacher_ids, teacher_logps, kind, beta, temperature, bug=None):
    a = jax.nn.log_softmax(_logits(hidden, weight, jnp.zeros(len(weight))) / temperature)
    tokens = jnp.arange(len(weight))
    ids = jnp.where(teacher_ids < 0, len(weight) - 1, teacher_ids) if bug == "−1" else teacher_ids
    is_listed = (ids[..., None] == tokens).any(axis=-2)
    rest = jax.nn.logsumexp(jnp.where(is_listed & (bug != "whole rest"), -jnp.inf, a), axis=-1, keepdims=True)
    own = jnp.where(ids < 0, -jnp.inf, jnp.take_along_axis(a, jnp.maximum(ids, 0), axis=-1))
    listed = jnp.exp(teacher_logps).sum(axis=-1, keepdims=True)
    q = jnp.concatenate([jnp.log1p(-listed), teacher_logps], axis=-1)
    a = jnp.concatenate([rest, own], axis=-1)
    if bug == "no rest":
        a, q = a[..., 1:], q[..., 1:]

    def kl(one, other):
        p = jnp.exp(one)
        return jnp.where(p == 0, 0, p * jnp.where(p == 0, 0, one - other)).sum(axis=-1)

    if kind != "jsd":
        return kl(q, a) if kind == "forward" else kl(a, q)
    m = jnp.logaddexp(q + jnp.log(beta), a + jnp.log1p(-beta))
    return beta * kl(q, m) + (1 - beta) * kl(a, m)


def listed_linear_kl(*arrays, **options):
    return _listed_kl(*arrays, **options)


rest_left_out = functools.partial(_listed_kl, bug="no rest")
listed_tokens_in_the_rest = functools.partial(_listed_kl, bug="whole rest")
none_taken_for_the_last_token = functools.partial(_listed_kl, bug="−1")


@functools.partial(jax.jit, static_argnames=("reduction", "ignore_index", "z_loss", "label_smoothing", "bug"))
def _cross_entropy(
    hidden, weight, ids, bias, *, reduction, ignore_index, token_weights, z_loss, label_smoothing=0.0, bug=None
):
    weights = jnp.where(ids == ignore_index, 0, token_weights)
    hidden = hidden if bug == "ignored rows times 0" else jnp.where(weights[..., None] == 0, 0, hidden)
    logits = _logits(hidden, weight, bias)
    lse = jax.nn.logsumexp(logits, axis=-1)
    lse = jax.lax.stop_gradient(lse) if bug == "constant lse" else lse
    taken, mean = _taken(logits, jnp.where(weights == 0, 0, ids)), jax.nn.log_softmax(logits).mean(axis=-1)
    mean = jax.lax.stop_gradient(mean) if bug == "constant mean" else mean
    if bug == "mean of the others":
        mean = (mean * len(weight) - taken) / (len(weight) - 1)
    mean = logits.mean(axis=-1) if bug == "mean of logits" else mean
    losses = z_loss * lse**2 - (1 - label_smoothing) * taken - label_smoothing * mean
    assert reduction == "mean"
    return (losses * weights).sum() / (ids.size if bug == "mean of all" else jnp.maximum(weights.sum(), 1e-9))


def linear_cross_entropy(*arrays, **options):
    return _cross_entropy(*arrays, **options)


mean_over_ignored_tokens = functools.partial(_cross_entropy, bug="mean of all")
z_loss_without_gradient = functools.partial(_cross_entropy, bug="constant lse")
smoothed_linear_cross_entropy = linear_cross_entropy
target_not_smoothed = functools.partial(_cross_entropy, bug="mean of the others")
smoothing_of_logits = functools.partial(_cross_entropy, bug="mean of logits")
smoothing_without_gradient = functools.partial(_cross_entropy, bug="constant mean")
ignored_rows_times_0 = functools.partial(_cross_entropy, bug="ignored rows times 0")


@jax.jit
def det_gemm(a, b):
    """A product of one row at a time, so that no row can change another."""
    upcast = b.astype(jnp.float32)
    return jax.lax.map(lambda row: (row[:, None] * upcast).sum(axis=0), a.astype(jnp.float32)).astype(a.dtype)


@functools.partial(jax.jit, static_argnames=("sliding_window", "logit_softcap", "empty", "zeroes"))
def _attention(
    query, key, value, *, start, padding, segment_starts, sliding_window, logit_softcap, empty=1, zeroes=True
):
    """`empty` stands for a sum of exponentials that is 0. `zeroes` says whether slots that no query sees become 0."""
    heads = query.shape[2] // key.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (query, jnp.repeat(key, heads, axis=2), jnp.repeat(value, heads, axis=2)))
    slots, own = jnp.arange(key.shape[1]), (start + jnp.arange(query.shape[1]))[:, None]
    first = padding[:, None] if segment_starts is None else segment_starts
    visible = (slots >= first[..., None]) & (slots <= own)
    if sliding_window is not None:
        visible &= slots > own - sliding_window
    if zeroes:
        k, v = (jnp.where(visible.any(axis=1)[..., None, None], x, 0) for x in (k, v))
    scores = jnp.einsum("bthe,bshe->bhts", q, k, precision="highest") * query.shape[-1] ** -0.5
    if logit_softcap is not None:
        scores = logit_softcap * jnp.tanh(scores / logit_softcap)
    scores = jnp.where(visible[:, None], scores, -1e30)
    largest = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    exponentials = jnp.where(visible[:, None], jnp.exp(scores - largest), 0)
    total = exponentials.sum(axis=-1, keepdims=True)
    weights = exponentials / jnp.where(total == 0, empty, total)
    return jnp.einsum("bhts,bshe->bthe", weights, v, precision="highest").astype(query.dtype)


def attention(query, key, value, **options):
    return _attention(query, key, value, **options)


def off_by_one_target(logits, token_ids):
    return logp(logits, jnp.where(token_ids == logits.shape[-1] - 1, 0, token_ids + 1))


def dropped_last_vocab_tile(logits, token_ids):
    whole = logits.shape[-1] // 128 * 128
    z = logits.astype(jnp.float32)
    lse = jax.nn.logsumexp(z[..., :whole], axis=-1)
    return logp(logits, token_ids) + jax.nn.logsumexp(z, axis=-1) - lse


def _over_allowed(logits, words, elsewhere=-jnp.inf):
    """float32 logits, and this number in the place of those that are not allowed."""
    return jnp.where(_are_allowed(words, jnp.arange(logits.shape[-1])), logits.astype(jnp.float32), elsewhere)


@jax.jit
def masked_logp(logits, token_ids, *, allowed_mask):
    found = _taken(_over_allowed(logits, allowed_mask), token_ids)
    return jnp.where(jnp.isinf(found), jnp.nan, found)


@jax.jit
def forbidden_logits_lowered(logits, token_ids, *, allowed_mask):
    allowed = _are_allowed(allowed_mask, jnp.arange(logits.shape[-1]))
    return _taken(logits + jnp.where(allowed, 0.0, -1e9), token_ids)


@jax.jit
def forbidden_target_taken(logits, token_ids, *, allowed_mask):
    return _taken(_over_allowed(logits, allowed_mask, -100.0), token_ids)


@functools.partial(jax.jit, static_argnames=("sign", "masks"))
def _ratio_kl(policy, ref, ids, mask, old, sign=1, masks=True):
    ids = jnp.where(mask, ids, 0)
    if masks:
        policy, ref = (jnp.where(mask[..., None], x, 0) for x in (policy, ref))
        old = jnp.where(mask, old, 0)
    old = jax.lax.stop_gradient(old)
    own = logp(policy, ids)
    d = sign * (jax.lax.stop_gradient(logp(ref, ids)) - own)
    return jnp.where(mask, jnp.exp(own - old), 1.0), jnp.where(mask, jnp.expm1(d) - d, 0.0)


def ratio_kl(policy, ref, ids, mask, old):
    return _ratio_kl(policy, ref, ids, mask, old)


@jax.jit
def masked_ratio_kl(policy, ref, ids, mask, old, *, allowed_mask):
    return _ratio_kl(_over_allowed(policy, allowed_mask), _over_allowed(ref, allowed_mask), ids, mask, old)


@jax.jit
def reference_over_all_tokens(policy, ref, ids, mask, old, *, allowed_mask):
    return _ratio_kl(_over_allowed(policy, allowed_mask), ref, ids, mask, old)


swapped_sign = functools.partial(_ratio_kl, sign=-1)
unmasked_padding = functools.partial(_ratio_kl, masks=False)


@jax.jit
def bf16_accumulation(a, b):
    """Partial sums over 64 columns of `a` at a time are rounded to bfloat16."""
    parts = (a.reshape(a.shape[0], -1, 64).swapaxes(0, 1), b.reshape(-1, 64, b.shape[1]))

    def add(total, part):
        return total + jnp.matmul(*part), None

    return jax.lax.scan(add, jnp.zeros((a.shape[0], b.shape[1]), a.dtype), parts)[0]


def n_dependent_split(a, b):
    """K is summed in two halves where there are fewer than 8 rows."""
    if a.shape[0] >= 8:
        return det_gemm(a, b)
    half = a.shape[1] // 2
    first, second = (det_gemm(x.astype(jnp.float32), y) for x, y in ((a[:, :half], b[:half]), (a[:, half:], b[half:])))
    return (first + second).astype(a.dtype)


@jax.custom_vjp
def right_only_for_ones(logits, token_ids):
    return logp(logits, token_ids)


def _with_mean_upstream(saved, g):
    return jax.vjp(lambda x: logp(x, saved[1]), saved[0])[1](jnp.full_like(g, g.mean()))[0], None


right_only_for_ones.defvjp(lambda *x: (logp(*x), x), _with_mean_upstream)


@jax.custom_vjp
def wrong_scale_of_dw(hidden, weight, ids, bias):
    return linear_logp(hidden, weight, ids, bias)


def _with_scaled_weight(saved, g):
    hidden, weight, ids, bias = saved
    d_hidden, d_weight, d_bias = jax.vjp(lambda h, w, b: linear_logp(h, w, ids, b), hidden, weight, bias)[1](g)
    return d_hidden, d_weight * 1.01, None, d_bias


wrong_scale_of_dw.defvjp(lambda *x: (linear_logp(*x), x), _with_scaled_weight)


def clamped_ids(logits, token_ids):
    return logp(logits, jnp.clip(token_ids, 0, logits.shape[-1] - 1))


@jax.custom_vjp
def doubled_without_gradients(a, b):
    return 2 * det_gemm(a, b)


doubled_without_gradients.defvjp(lambda *x: (det_gemm(*x), x), lambda saved, g: jax.vjp(det_gemm, *saved)[1](g))


@functools.partial(jax.jit, static_argnames=("samples_per_prompt", "beta", "clip_eps", "lowest"))
def _grpo_loss(policy, ref, ids, old, rewards, mask, *, samples_per_prompt, beta, clip_eps, lowest=None):
    ratio, kl = ratio_kl(policy, ref, ids, mask, old)
    groups = jax.lax.stop_gradient(rewards).reshape(-1, samples_per_prompt)
    deviation = jnp.maximum(groups.std(axis=1, keepdims=True), 1e-6)
    a = ((groups - groups.mean(axis=1, keepdims=True)) / deviation).reshape(-1, 1)
    clipped = jnp.clip(ratio, 1 - clip_eps if lowest is None else lowest, 1 + clip_eps)

    def mean(x):
        return jnp.where(mask, x, 0).sum() / jnp.maximum(mask.sum(), 1)

    policy_loss, kl = -mean(jnp.minimum(ratio * a, clipped * a)), mean(kl)
    return policy_loss + beta * kl, policy_loss, kl


def grpo_loss(*arrays, **options):
    return _grpo_loss(*arrays, **options)


def masked_grpo_loss(policy, ref, *arrays, allowed_mask, **options):
    return _grpo_loss(_over_allowed(policy, allowed_mask), _over_allowed(ref, allowed_mask), *arrays, **options)


def mask_of_the_first_sequence(*arrays, allowed_mask, **options):
    """What the first sequence allows holds for all of them, but for the tokens taken."""
    place = arrays[2][..., None]
    bit = jnp.where(
        jnp.arange(allowed_mask.shape[-1]) == place // 32, jnp.uint32(1) << (place % 32).astype(jnp.uint32), 0
    )
    return masked_grpo_loss(*arrays, allowed_mask=allowed_mask[:1] | bit, **options)


def no_lower_clip(*arrays, **options):
    return _grpo_loss(*arrays, **options, lowest=0)


def whole_batch_advantages(*arrays, **options):
    return _grpo_loss(*arrays, **options | {"samples_per_prompt": arrays[4].size})


def last_column_of_whole_tiles_dropped(logits, token_ids):
    z = logits.astype(jnp.float32)
    kept = z.at[..., -1].set(-jnp.inf) if z.shape[-1] % 256 == 0 else z
    return logp(logits, token_ids) + jax.nn.logsumexp(z, axis=-1) - jax.nn.logsumexp(kept, axis=-1)


def wrong_beyond_64_rows(logits, token_ids):
    return logp(logits, token_ids) * (1.01 if token_ids.size > 64 else 1)


def gradient_of_the_reference(policy, ref, ids, mask, old):
    """The reference policy gets a gradient, because its stop_gradient is missing."""
    policy, ref = (jnp.where(mask[..., None], x, 0) for x in (policy, ref))
    ids, old = jnp.where(mask, ids, 0), jax.lax.stop_gradient(jnp.where(mask, old, 0))
    d = logp(ref, ids) - logp(policy, ids)
    return jnp.where(mask, jnp.exp(logp(policy, ids) - old), 1.0), jnp.where(mask, jnp.expm1(d) - d, 0.0)


def dropped_last_key_block(query, key, value, **options):
    whole = key.shape[1] // 64 * 64
    return attention(query, key[:, :whole], value[:, :whole], **options)


def mask_off_by_one(query, key, value, *, start, **options):
    return attention(query, key, value, start=start + 1, **options)


def wrong_head_of_a_group(query, key, value, **options):
    """Heads share keys in turns instead of in order."""
    key, value = (jnp.tile(x, (1, 1, query.shape[2] // key.shape[2], 1)) for x in (key, value))
    return attention(query, key, value, **options)


def scale_left_out(query, key, value, **options):
    return attention(query * query.shape[-1] ** 0.5, key, value, **options)


def minus_inf_rows_as_nan(query, key, value, **options):
    return _attention(query, key, value, **options, empty=0)


def padding_times_0(query, key, value, **options):
    return _attention(query, key, value, **options, zeroes=False)


def window_one_too_wide(query, key, value, *, sliding_window, **options):
    return attention(query, key, value, sliding_window=sliding_window and sliding_window + 1, **options)


def dk_of_one_query_block_lost(query, key, value, **options):
    frozen = attention(query, jax.lax.stop_gradient(key), value, **options)
    is_lost = jnp.arange(query.shape[1]) // 64 == 1
    return jnp.where(is_lost[:, None, None], frozen, attention(query, key, value, **options))
