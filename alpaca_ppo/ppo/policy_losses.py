"""The policy losses that a configuration can name: which function of `functional` each calls, with which of the
configuration's options.
"""

from functools import partial
from typing import Any

from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.functional import (
    Loss,
    cispo_policy_loss,
    dppo_policy_loss,
    gmpo_policy_loss,
    gspo_policy_loss,
    policy_loss,
    sapo_policy_loss,
)
from alpaca_ppo.registry import POLICY_LOSSES, DppoDivergence
from alpaca_ppo.types import Rollouts

_DPPO_RATIO_BOUND = 20.0


def configured_policy_loss(logprobs: Tensor, batch: Rollouts, args: PPOConfig) -> Any:
    """What the loss that `args.policy_loss` names returns for a micro-batch: a `Loss`, unless a user's loss is wrong.

    Args:
        logprobs: (B, R), of the policy in training, in nats.
        batch: the micro-batch.
        args: the run's configuration.
    """
    return POLICY_LOSSES.get(args.policy_loss)(
        logprobs,
        batch["logprobs"],
        batch["advantages"],
        batch["response_mask"],
        args=args,
        weights=batch.get("loss_weights"),
        denominator=batch["denominator"],
    )


@POLICY_LOSSES.implement("clip")
def _clip(*batch: Tensor, args: PPOConfig, weights: Tensor | None, denominator: Tensor) -> Loss:
    return policy_loss(
        *batch,
        cliprange_low=args.cliprange,
        cliprange_high=args.cliprange_high or args.cliprange,
        clip_ratio_c=args.clip_ratio_c,
        loss_agg_mode=args.loss_agg_mode,
        weights=weights,
        denominator=denominator,
    )


@POLICY_LOSSES.implement("gspo")
def _gspo(*batch: Tensor, args: PPOConfig, weights: Tensor | None, denominator: Tensor) -> Loss:
    return gspo_policy_loss(
        *batch,
        cliprange_low=args.cliprange,
        cliprange_high=args.cliprange_high or args.cliprange,
        loss_agg_mode=args.loss_agg_mode,
        weights=weights,
        denominator=denominator,
    )


@POLICY_LOSSES.implement("cispo")
def _cispo(*batch: Tensor, args: PPOConfig, weights: Tensor | None, denominator: Tensor) -> Loss:
    return cispo_policy_loss(
        *batch,
        cliprange_low=args.cliprange,
        cliprange_high=args.cliprange_high or args.cliprange,
        loss_agg_mode=args.loss_agg_mode,
        weights=weights,
        denominator=denominator,
    )


@POLICY_LOSSES.implement("sapo")
def _sapo(*batch: Tensor, args: PPOConfig, weights: Tensor | None, denominator: Tensor) -> Loss:
    return sapo_policy_loss(
        *batch,
        tau_pos=1.0,
        tau_neg=1.05,
        loss_agg_mode=args.loss_agg_mode,
        weights=weights,
        denominator=denominator,
    )


@POLICY_LOSSES.implement("gmpo")
def _gmpo(*batch: Tensor, args: PPOConfig, weights: Tensor | None, denominator: Tensor) -> Loss:
    return gmpo_policy_loss(
        *batch,
        cliprange_low=args.cliprange,
        cliprange_high=args.cliprange_high or args.cliprange,
        weights=weights,
        denominator=denominator,
    )


@POLICY_LOSSES.implement("dppo")
def _dppo(*batch: Tensor, divergence: DppoDivergence = "tv", args: PPOConfig, **weighting: Any) -> Loss:
    return dppo_policy_loss(
        *batch,
        divergence=divergence,
        cliprange_low=args.cliprange,
        cliprange_high=args.cliprange_high or args.cliprange,
        clip_ratio_c=args.clip_ratio_c or _DPPO_RATIO_BOUND,
        loss_agg_mode=args.loss_agg_mode,
        **weighting,
    )


POLICY_LOSSES.implement("dppo_kl")(partial(_dppo, divergence="kl"))
