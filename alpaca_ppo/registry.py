"""The names of estimators, losses, critics and so on: one registry per option that users may extend.

Built-in names are declared here, with what the configuration must know of them (traits), so that it can check them
without importing torch; the code is attached where it is written. A user's file does both with one decorator, such as
`functional.register_adv_estimator`, and is imported before the configuration is read (`import_modules`).

Fixed sets of values that both the configuration and the code check are types here.
"""

from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, TypeVar, get_args

T = TypeVar("T")

# How per-token losses become a scalar; see `functional.aggregate_loss`.
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

# One importance weight per token or per sequence; see `functional.rollout_correction_weights`.
RolloutCorrectionLevel = Literal["token", "sequence"]

# The tail of a distribution of returns whose mean is taken; see `functional.cvar_from_quantiles`.
CVaRTail = Literal["lower", "upper"]

# What bounds a token's change; see `functional.dppo_policy_loss`.
DppoDivergence = Literal["tv", "kl"]


class Registry(Generic[T]):
    """The valid names of one option, and the code behind each.

    Attributes:
        field: the option.
        traits: what the configuration must know of each name, such as `{"gae": {"needs_critic": True}}`.
        defaults: all traits with their default values.
        built_in: the names declared here.
    """

    def __init__(self, field: str, traits: dict[str, dict[str, Any]], defaults: Mapping[str, Any]) -> None:
        self.field, self.traits, self.defaults = field, traits, defaults
        self.built_in = tuple(traits)
        self._targets: dict[str, T] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.traits)

    def trait(self, name: str, trait: str) -> Any:
        self.check(name)
        return self.traits[name].get(trait, self.defaults[trait])

    def names_with(self, **traits: Any) -> tuple[str, ...]:
        """The names whose traits have these values, such as `names_with(needs_critic=True)`."""
        return tuple(n for n in self.names if all(self.trait(n, trait) == value for trait, value in traits.items()))

    def check(self, name: str, *, field: str | None = None) -> None:
        """Raises a `ValueError` if `name` is not registered; `field` is another option with the same valid names."""
        if name not in self.traits:
            problem = f"{field or self.field} is {name!r}; choose one of {', '.join(self.names)}"
            raise ValueError(f"{problem}, or register your own and add its file to import_modules")

    def implement(self, name: str) -> Callable[[T], T]:
        """A decorator that attaches code to the declared `name`."""
        assert name in self.traits, f"{name!r} is no {self.field}"

        def attach(target: T) -> T:
            self._targets[name] = target
            return target

        return attach

    def register(self, name: str, **traits: Any) -> Callable[[T], T]:
        """A decorator that adds `name` and attaches code to it.

        A later registration replaces an earlier one, so that a notebook's cell can be run again.
        """
        if not name or any(character.isspace() or character in ",:" for character in name):
            raise ValueError(f"{self.field} cannot be named {name!r}; use a word without spaces, commas and colons")
        if name in self.built_in:
            raise ValueError(f"{self.field} {name!r} exists already; choose another name")
        if unknown := [trait for trait in traits if trait not in self.defaults]:
            raise TypeError(f"{self.field} {name!r} is given {unknown[0]}; it takes {', '.join(self.defaults)}")
        self.traits[name] = traits
        return self.implement(name)

    def get(self, name: str) -> T:
        self.check(name)
        return self._targets[name]


# `needs_critic`: reads the critic's values. `needs_group`: compares several responses to one prompt.
# `needs_greedy_baseline`: reads the score of a greedy response to each prompt. `needs_scores_by_source`: reads the
# scores of each reward source. `uses_gamma`: discounts by `gamma`, as estimators with a critic do too.
ADV_ESTIMATORS: Registry[Callable[..., Any]] = Registry(
    "adv_estimator",
    {
        "gae": {"needs_critic": True, "uses_gamma": True},
        "grpo": {"needs_group": True},
        "grpo_no_std": {"needs_group": True},
        "rloo": {"needs_group": True},
        "opo": {"needs_group": True},
        "reinforce_plus_plus_baseline": {"needs_group": True},
        "qae": {"needs_group": True},
        "grpo_passk": {"needs_group": True},
        "gdpo": {"needs_group": True, "needs_scores_by_source": True},
        "reinforce_plus_plus": {"uses_gamma": True},
        "remax": {"needs_greedy_baseline": True},
    },
    dict.fromkeys("needs_critic needs_group needs_greedy_baseline needs_scores_by_source uses_gamma".split(), False),
)

# For `kl_estimator` and `kl_loss_type`. `kink_at_zero`: has no derivative where policy and reference are equal, so
# `kl_loss_type` refuses it.
KL_ESTIMATORS: Registry[Callable[..., Any]] = Registry(
    "kl_estimator",
    {
        "k1": {},
        "abs": {"kink_at_zero": True},
        "k2": {},
        "k3": {},
        "k1_clamped": {"kink_at_zero": True},
        "k1+": {},
        "k3+": {},
    },
    {"kink_at_zero": False},
)

# `clips`: reads `cliprange_high`. `dual_clip`: reads `clip_ratio_c`. `loss_agg_mode`: the only mode that the loss
# allows; None allows all.
POLICY_LOSSES: Registry[Callable[..., Any]] = Registry(
    "policy_loss",
    {
        "clip": {"dual_clip": True},
        "gspo": {"loss_agg_mode": "seq-mean-token-mean"},
        "cispo": {},
        "sapo": {"clips": False},
        "gmpo": {"loss_agg_mode": "seq-mean-token-mean"},
        "dppo": {"dual_clip": True},
        "dppo_kl": {"dual_clip": True},
    },
    {"clips": True, "dual_clip": False, "loss_agg_mode": None},
)

# `distributional`: predicts a distribution of returns, so that `risk_level` applies. `fixed_support`: predicts the
# probabilities of fixed returns within `value_support`.
CRITIC_HEADS: Registry[Any] = Registry(
    "critic",
    {
        "scalar": {},
        "c51": {"distributional": True, "fixed_support": True},
        "hl_gauss": {"distributional": True, "fixed_support": True},
        "quantile": {"distributional": True},
        "iqn": {"distributional": True},
    },
    {"distributional": False, "fixed_support": False},
)

# Functions that make a `generation.Backend` from the run's configuration. For the estimate of memory: whether it runs
# the policy in the process that trains, and whether it does so in slots.
GENERATION_BACKENDS: Registry[Callable[..., Any]] = Registry(
    "generation_backend",
    {"auto": {}, "slots": {}, "generate": {"in_slots": False}, "vllm": {"in_process": False}},
    {"in_process": True, "in_slots": True},
)


DoctorRule = Literal[
    "empty_answers", "constant_reward", "reward_falling", "eval_falling", "overoptimization", "uniform_groups",
    "policy_does_not_move", "kl_runaway", "entropy_collapse", "length_collapse", "all_truncated", "update_too_large",
    "skipped_updates", "logprobs_disagree", "critic_useless",
]  # fmt: skip
# The rules of `doctor.rules`, in the order in which findings are reported.
DOCTOR_RULES: tuple[DoctorRule, ...] = get_args(DoctorRule)

# error: the run is ruined or learns nothing. warning: look at it while the run goes on.
DoctorSeverity = Literal["warning", "error"]
