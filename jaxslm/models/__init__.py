"""The models by name, and what they have in common."""

from jaxslm.models.gpt import GPT, GPTConfig
from jaxslm.models.lumen import Lumen, LumenConfig
from jaxslm.models.ripple import Ripple, RippleConfig

Config = LumenConfig | GPTConfig | RippleConfig
Model = Lumen | GPT | Ripple

MODELS: dict[str, tuple[type[Config], type[Model]]] = {
    "lumen": (LumenConfig, Lumen),
    "gpt": (GPTConfig, GPT),
    "ripple": (RippleConfig, Ripple),
}


def model_name(config: Config) -> str:
    """The key of MODELS that a config belongs to."""
    return next(name for name, (kind, _) in MODELS.items() if type(config) is kind)
