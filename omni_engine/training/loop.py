# SPDX-License-Identifier: Apache-2.0
"""The training loop: prompts, rollout, reward, advantage, update, log."""

from __future__ import annotations

from collections.abc import Mapping

from omni_engine.flow import Samples
from omni_engine.rollout import IterationPlan, RolloutRequest, plan_iteration
from omni_engine.training.run import Run


def train(run: Run) -> None:
    """Train from `run.iteration` to the end; evaluate, save and log on the way. All ranks call it alike."""
    run.logger.start(run.iteration, run.train_iters)
    if run.iteration == 0:
        evaluate(run)
    while run.iteration < run.train_iters:
        with run.profiler.iteration(run.iteration):
            metrics = train_iteration(run)
        run.iteration += 1
        log(run, metrics)
        last = run.iteration == run.train_iters
        if run.eval_interval and (last or run.iteration % run.eval_interval == 0):
            evaluate(run)
        if run.save_interval and (last or run.iteration % run.save_interval == 0):
            with run.timers.phase("save"):
                run.save()


def train_iteration(run: Run) -> dict[str, float]:
    """One rollout with its updates. Returns metrics, equal on every rank."""
    prompts = [run.prompts[index] for index in run.sampler.at(run.iteration)]
    plan = plan_iteration(run.iteration, prompts, run.updater.rules.updates, run.rollout, run.seed, run.groups)
    with run.timers.phase("rollout"):
        samples = sample(run, plan)
    run.meter.count(plan)
    with run.timers.phase("reward_wait"):
        scored = run.rewards.collect(plan.ids, plan.groups)
    metrics = run.updater.run(samples, scored)
    with run.timers.phase("weight_sync"):
        run.engine.update_weights(run.policy.version)
    return scored.metrics() | metrics


def sample(run: Run, plan: IterationPlan) -> Samples:
    """Sample this rank's share of an iteration; pictures go to the scorers while sampling goes on."""
    request = RolloutRequest(
        ids=plan.ids,
        groups=plan.groups,
        prompts=plan.prompts,
        prompt_of=plan.prompt_of,
        seed=run.seed,
        schedule=run.schedule,
        sde_type=run.rollout.sde_type,
        noise_level=run.rollout.noise_level,
        window=plan.window,
        guidance=run.updater.guidance,
        micro_batch_size=run.updater.rules.micro_batch_size,
    )
    parts = []
    for chunk in run.engine.generate(request):
        run.rewards.submit(chunk)
        parts.append(chunk.samples)
    return Samples.cat(parts)


def log(run: Run, metrics: Mapping[str, float]) -> None:
    """Record an iteration with its times, throughput and memory."""
    times = run.timers.collect()
    rate = run.rollout.samples_per_step / times["time/elapsed"] / run.groups.world_size
    run.logger.log(
        run.iteration,
        {
            **metrics,
            **times,
            **run.memory(),
            **run.meter.rates(times["time/elapsed"]),
            "throughput/images_per_second_per_device": rate,
            "progress/consumed_samples": float(run.iteration * run.rollout.samples_per_step),
        },
        run.train_iters,
    )


def evaluate(run: Run) -> None:
    """Score the held-out prompts and draw their pictures."""
    if run.evaluator is None:
        return
    with run.timers.phase("validate"), run.weights(run.settings.ema.eval_weights):
        result = run.evaluator.run()
    if result.failed:
        run.logger.message(f"{result.failed} held-out prompts could not be scored and are left out of the means")
    run.logger.log_eval(
        run.iteration, result.rewards, result.images, result.prompts, result.captions, run.timers.collect()
    )
