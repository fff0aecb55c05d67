"""Check that the rollout engine of an RL run samples from the policy, before the first step."""

from __future__ import annotations

from burnish.config import RLConfig
from burnish.preflight.sampling import vocab_size_of
from burnish.rollout.base import RolloutEngine, Sampling
from burnish.rollout.weight_probe import NUM_SAMPLES, check_logprobs, probe_requests
from burnish.runtime.base import Runtime
from burnish.train.base import TrainEngine
from burnish.types import rows_to_batch


def check_first_weights(
    config: RLConfig, engine: RolloutEngine, policy: TrainEngine, runtime: Runtime
) -> None:
    """Raise StaleWeightsError if the log-probs of ``engine``, which has the weights of ``policy``,
    are not those of ``policy``. The local engine computes with transformers and is not checked."""
    rollout = config.rollout
    if rollout.engine.uses_transformers:
        return
    size = min(len(runtime.tokenizer), vocab_size_of(config.model) or len(runtime.tokenizer))
    limit = engine.max_len or config.data.prompt_max_len + config.row_lengths.rest
    ranks = config.cluster.ranks("policy") or 1
    requests = probe_requests(size, max_len=limit, num_samples=max(NUM_SAMPLES, ranks))
    sampling = Sampling(requests[0].max_tokens or 1, rollout.temperature)
    by_request = {c.request_id: c for c in engine.generate(requests, sampling)}
    completions = [by_request[request.request_id] for request in requests]
    if rollout.engine.sleeps:
        engine.sleep()
    length = len(requests[0].prompt_ids)
    rows = [[*r.prompt_ids, *c.token_ids] for r, c in zip(requests, completions, strict=True)]
    masks = [[i >= length for i in range(len(row))] for row in rows]
    batch = rows_to_batch(rows, masks, prompt_lens=[length] * len(rows))
    logprobs = policy.logprobs(batch)[batch.action_mask]
    expected = logprobs.split([len(c.token_ids) for c in completions])
    check_logprobs(
        completions,
        expected,
        temperature=rollout.temperature,
        dtypes=(config.precision.dtype, config.precision.sampler_dtype),
    )
