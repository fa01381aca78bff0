"""jaxslm: Lumen, GPT and Ripple as Flax modules.

Axis names, used in every array name and einsum of the project:
    B batch    T query position   S key position   D model width    V vocabulary
    N query heads   K key-value heads   G = N/K   H head width   F mlp width   L layers
"""

from jaxslm.generation import Generator, generate
from jaxslm.models import MODELS, Config, Model
from jaxslm.models.gpt import GPT, GPTConfig
from jaxslm.models.lumen import Lumen, LumenConfig
from jaxslm.models.ripple import Ripple, RippleConfig
from jaxslm.sampling import Sampling
from jaxslm.tokenizer import load_tokenizer
from jaxslm.weights import load, save

__version__ = "0.1.0"
__all__ = [
    "GPT",
    "MODELS",
    "Config",
    "GPTConfig",
    "Generator",
    "Lumen",
    "LumenConfig",
    "Model",
    "Ripple",
    "RippleConfig",
    "Sampling",
    "generate",
    "load",
    "load_tokenizer",
    "save",
]
