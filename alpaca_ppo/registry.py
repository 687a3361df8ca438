"""Names that a configuration may choose among, and that a user may add to: one registry a family.

Torch-free and below everything else, so that the configuration can list and check names without loading what they
stand for. The built-in names are declared here with what the configuration must know of them; the code behind a name
is attached where it is written. A user's own file does both with one decorator, such as
`functional.register_adv_estimator`, and is imported before the configuration is read (`import_modules`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclasses.dataclass
class Registry(Generic[T]):
    """The choices of one field of the configuration.

    Attributes:
        field: the configuration's field, which errors name.
        traits: what the configuration must know of each name, `{"gae": {"needs_critic": True}}`.
        defaults: the traits that a registration may set, with the value of those it leaves out.
    """

    field: str
    traits: dict[str, dict[str, Any]]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    _targets: dict[str, T] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Every choice, the built-in ones first."""
        return tuple(self.traits)

    def trait(self, name: str, trait: str) -> Any:
        """What is known of the choice `name`, such as whether it needs a critic.

        Raises:
            ValueError: when there is no such choice.
        """
        self.check(name)
        return self.traits[name].get(trait, self.defaults[trait])

    def check(self, name: str) -> None:
        """Checks that `name` is a choice.

        Raises:
            ValueError: names the field, the value and the choices.
        """
        if name not in self.traits:
            raise ValueError(
                f"{self.field} is {name!r}; choose one of {', '.join(self.names)}, or register your own and name its "
                "file in import_modules"
            )

    def implement(self, name: str) -> Callable[[T], T]:
        """A decorator that attaches code to the declared choice `name`."""
        assert name in self.traits, f"{name!r} is no declared {self.field}"

        def attach(target: T) -> T:
            self._targets[name] = target
            return target

        return attach

    def register(self, name: str, **traits: Any) -> Callable[[T], T]:
        """A decorator that adds the choice `name` and attaches code to it.

        Raises:
            ValueError: when the name is taken by other code, or is none that YAML and a command line can hold.
        """
        if not name or name != name.strip() or any(character in name for character in " ,:"):
            raise ValueError(f"{name!r} cannot be a {self.field}: use a word without spaces, commas and colons")
        unknown = set(traits) - set(self.defaults)
        if unknown:
            raise TypeError(f"a {self.field} has no {', '.join(sorted(unknown))}; it has {', '.join(self.defaults)}")

        def attach(target: T) -> T:
            known = self._targets.get(name)
            # A file that is imported twice, under two names, registers the same code again.
            if name in self.traits and _origin(known) != _origin(target):
                raise ValueError(f"{self.field} {name!r} is registered already ({known!r}); choose another name")
            self.traits[name] = dict(traits)
            self._targets[name] = target
            return target

        return attach

    def get(self, name: str) -> T:
        """The code behind the choice `name`.

        Raises:
            ValueError: when there is no such choice.
        """
        self.check(name)
        return self._targets[name]


def _origin(target: Any) -> tuple[Any, Any]:
    code = getattr(target, "__code__", None)
    return (getattr(target, "__qualname__", target), code and (code.co_filename, code.co_firstlineno))


ADV_ESTIMATORS: Registry[Callable[..., Any]] = Registry(
    "adv_estimator",
    {
        "gae": {"needs_critic": True},
        "grpo": {"needs_group": True},
        "grpo_no_std": {"needs_group": True},
        "rloo": {"needs_group": True},
        "opo": {"needs_group": True},
        "reinforce_plus_plus_baseline": {"needs_group": True},
        "reinforce_plus_plus": {"uses_gamma": True},
        "remax": {"needs_greedy_baseline": True},
    },
    {"needs_critic": False, "needs_group": False, "needs_greedy_baseline": False, "uses_gamma": False},
)
KL_ESTIMATORS: Registry[Callable[..., Any]] = Registry(
    "kl_estimator", {name: {} for name in ("k1", "abs", "k2", "k3", "k1_clamped", "k1+", "k3+")}
)
POLICY_LOSSES: Registry[Callable[..., Any]] = Registry(
    "policy_loss",
    {"clip": {"dual_clip": True}, "gspo": {"loss_agg_mode": "seq-mean-token-mean"}},
    {"dual_clip": False, "loss_agg_mode": None},
)
CRITIC_HEADS: Registry[Any] = Registry(
    "critic",
    {
        "scalar": {},
        "c51": {"distributional": True},
        "quantile": {"distributional": True},
        "iqn": {"distributional": True},
    },
    {"distributional": False},
)
GENERATION_BACKENDS: Registry[Callable[..., Any]] = Registry("generation_backend", {"decode": {}, "generate": {}})
