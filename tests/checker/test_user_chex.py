"""A test as a user of rlk_jax would write it, with chex, the public API and the definition of log-probabilities."""

import chex
import jax
import jax.numpy as jnp
from absl.testing import parameterized

import rlk_jax
from rlk_jax.checker import tolerance


@jax.jit
def log_probs(hidden, weight, target_ids, temperature):
    """Log-probabilities as a trainer computes them without rlk_jax, from all the logits."""
    logits = (hidden @ weight.T) / temperature
    return jnp.take_along_axis(jax.nn.log_softmax(logits), target_ids[..., None], axis=-1)[..., 0]


class LinearLogpTest(chex.TestCase):
    def setUp(self):
        super().setUp()
        keys = jax.random.split(jax.random.key(0), 3)
        self.hidden = jax.random.normal(keys[0], (2, 9, 32))
        self.weight = jax.random.normal(keys[1], (301, 32)) / 6
        self.target_ids = jax.random.randint(keys[2], (2, 9), 0, 301)

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(0.7, 1.0)
    def test_log_probs(self, temperature):
        @self.variant
        def ours(hidden, weight, target_ids):
            return rlk_jax.linear_logp(hidden, weight, target_ids, temperature=temperature)

        actual = ours(self.hidden, self.weight, self.target_ids)
        expected = log_probs(self.hidden, self.weight, self.target_ids, temperature)
        chex.assert_shape(actual, (2, 9))
        chex.assert_tree_all_finite(actual)
        chex.assert_trees_all_close(actual, expected, rtol=tolerance("linear_logp", jnp.float32, "forward"))

    @chex.variants(with_jit=True, without_jit=True)
    def test_policy_gradient(self):
        advantages = jnp.asarray([[1.0], [-1.0]])

        def loss(f, weight):
            return -(advantages * f(self.hidden, weight, self.target_ids, temperature=1.0)).mean()

        actual = self.variant(jax.grad(lambda w: loss(rlk_jax.linear_logp, w)))(self.weight)
        expected = jax.grad(lambda w: loss(log_probs, w))(self.weight)
        chex.assert_trees_all_close(actual, expected, atol=tolerance("linear_logp", jnp.float32, "gradient"))

    def test_padding_does_not_change_the_bits_of_a_token(self):
        def logp(hidden, target_ids):
            return rlk_jax.linear_logp(
                hidden, self.weight, target_ids, ignore_index=-100, implementation="deterministic"
            )

        alone = logp(self.hidden, self.target_ids)
        padded = logp(
            jnp.pad(self.hidden, ((0, 0), (3, 5), (0, 0)), constant_values=jnp.nan),
            jnp.pad(self.target_ids, ((0, 0), (3, 5)), constant_values=-100),
        )
        chex.assert_trees_all_equal(padded[:, 3:-5], alone)

    def test_one_trace_for_every_step(self):
        chex.clear_trace_counter()
        step = jax.jit(chex.assert_max_traces(rlk_jax.linear_logp, n=1))
        for _ in range(3):
            step(self.hidden, self.weight, self.target_ids)
