"""Names that a configuration may choose among and that users may extend: one registry per option.

This module does not import torch and lies below the rest of the package, so that the configuration can list and check
names without loading the code behind them. Built-in names are declared here with what the configuration must know of
them, and the code is attached where it is written. A user's own file does both with one decorator, such as
`functional.register_adv_estimator`, and is imported before the configuration is read (`import_modules`).

Options whose values are fixed, but which both the configuration and `functional` check, are types here.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, TypeVar, get_args

T = TypeVar("T")

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""How per-token losses become a scalar; see `functional.aggregate_loss`."""

RolloutCorrectionLevel = Literal["token", "sequence"]
"""One importance weight per token or per sequence; see `functional.rollout_correction_weights`."""

CVaRTail = Literal["lower", "upper"]
"""The tail of a distribution of returns whose mean is taken; see `functional.cvar_from_quantiles`."""

DppoDivergence = Literal["tv", "kl"]
"""What bounds a token's change; see `functional.dppo_policy_loss`."""


@dataclasses.dataclass
class Registry(Generic[T]):
    """The valid names of one option, and the code behind each.

    Attributes:
        field: the option of the configuration, which errors name.
        traits: what the configuration must know of each name, such as `{"gae": {"needs_critic": True}}`.
        defaults: the traits that a registration may set, with their default values.
        built_in: the names declared here, as opposed to those that users register.
    """

    field: str
    traits: dict[str, dict[str, Any]]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    built_in: tuple[str, ...] = dataclasses.field(init=False)
    _targets: dict[str, T] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.built_in = tuple(self.traits)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, the built-in ones first."""
        return tuple(self.traits)

    def trait(self, name: str, trait: str) -> Any:
        """The value of one trait of `name`, such as whether an estimator needs a critic.

        Raises:
            ValueError: when there is no such name.
        """
        self.check(name)
        return self.traits[name].get(trait, self.defaults[trait])

    def names_with(self, **traits: Any) -> tuple[str, ...]:
        """The names whose traits have these values, `names_with(needs_critic=True)`."""
        return tuple(n for n in self.names if all(self.trait(n, trait) == value for trait, value in traits.items()))

    def check(self, name: str, *, field: str | None = None) -> None:
        """Checks that `name` is registered.

        Args:
            name: the value of the option.
            field: the option that errors name, where a second option takes the same names.

        Raises:
            ValueError: names the option, its value and the valid names.
        """
        if name not in self.traits:
            raise ValueError(
                f"{field or self.field} is {name!r}; choose one of {', '.join(self.names)}, or register your own and "
                "add its file to import_modules"
            )

    def implement(self, name: str) -> Callable[[T], T]:
        """A decorator that attaches code to `name`, whose traits are declared."""
        assert name in self.traits, f"{name!r} is no {self.field}"

        def attach(target: T) -> T:
            self._targets[name] = target
            return target

        return attach

    def register(self, name: str, **traits: Any) -> Callable[[T], T]:
        """A decorator that adds `name` and attaches code to it. A later definition, such as a notebook's cell that
        is run again, replaces an earlier one.

        Raises:
            ValueError: when the name is a built-in one, or cannot be written in YAML and on a command line.
        """
        if not name or any(character.isspace() or character in ",:" for character in name):
            raise ValueError(f"{self.field} cannot be named {name!r}; use a word without spaces, commas and colons")
        if name in self.built_in:
            raise ValueError(f"{self.field} {name!r} exists already; choose another name")
        self.traits[name] = traits
        return self.implement(name)

    def get(self, name: str) -> T:
        """The code behind `name`.

        Raises:
            ValueError: when there is no such name.
        """
        self.check(name)
        return self._targets[name]


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
    dict.fromkeys(
        ("needs_critic", "needs_group", "needs_greedy_baseline", "needs_scores_by_source", "uses_gamma"), False
    ),
)
"""`needs_critic`: reads the critic's values. `needs_group`: compares several responses to one prompt.
`needs_greedy_baseline`: reads the score of a greedy response to each prompt. `needs_scores_by_source`: reads the scores
of each reward source. `uses_gamma`: discounts by `gamma`, which must be 1 for an estimator with neither a critic nor
this trait."""

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
"""Names for `kl_estimator` and `kl_loss_type`. `kink_at_zero`: has no derivative where policy and reference are equal,
so the loss refuses it."""

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
"""`clips`: reads `cliprange_high`. `dual_clip`: reads `clip_ratio_c`. `loss_agg_mode`: the only mode that the loss
allows; None allows all."""

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
"""`distributional`: predicts a distribution of returns, so that `risk_level` applies. `fixed_support`: gives
probabilities to returns between two ends, `PPOConfig.value_support`."""

GENERATION_BACKENDS: Registry[Callable[..., Any]] = Registry(
    "generation_backend",
    {"auto": {}, "slots": {}, "generate": {"in_slots": False}, "vllm": {"in_process": False}},
    {"in_process": True, "in_slots": True},
)
"""Each makes a `generation.Backend` of the run's configuration. For the estimate of memory: whether it runs the policy
in the process that trains, and whether it does so in slots."""


DoctorRule = Literal[
    "empty_answers", "constant_reward", "reward_falling", "eval_falling", "overoptimization", "uniform_groups",
    "policy_does_not_move", "kl_runaway", "entropy_collapse", "length_collapse", "all_truncated", "update_too_large",
    "skipped_updates", "logprobs_disagree", "critic_useless",
]  # fmt: skip
DOCTOR_RULES: tuple[DoctorRule, ...] = get_args(DoctorRule)
"""The rules of `doctor.rules`, in the order in which findings are reported."""

DoctorSeverity = Literal["warning", "error"]
"""An error ruins the run or lets it learn nothing, a warning is worth a look while it goes on."""
