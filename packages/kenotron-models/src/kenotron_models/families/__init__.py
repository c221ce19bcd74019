"""The families: a file for each has the keys of its config, its blocks, and its names elsewhere."""

from kenotron_models.families.deepseek_v3 import DeepseekV3Config
from kenotron_models.families.gemma import Gemma2Config, Gemma3Config
from kenotron_models.families.glm4_moe import Glm4MoEConfig
from kenotron_models.families.gpt_oss import GptOssConfig
from kenotron_models.families.granite_hybrid import GraniteHybridConfig
from kenotron_models.families.jamba import JambaConfig
from kenotron_models.families.llama import LlamaConfig
from kenotron_models.families.llamoe import LlaMoEConfig
from kenotron_models.families.mamba import MambaModelConfig
from kenotron_models.families.mamba2 import Mamba2ModelConfig
from kenotron_models.families.mistral import MistralConfig
from kenotron_models.families.mixtral import MixtralConfig
from kenotron_models.families.moe_config import MoEConfig
from kenotron_models.families.nemotron_h import NemotronHConfig
from kenotron_models.families.olmo2 import OLMo2Config, OLMo3Config
from kenotron_models.families.olmoe import OLMoEConfig
from kenotron_models.families.phi3 import Phi3Config
from kenotron_models.families.qwen2 import Qwen2Config
from kenotron_models.families.qwen3 import Qwen3Config
from kenotron_models.families.qwen3_moe import Qwen3MoEConfig
from kenotron_models.families.qwen3_next import Qwen3NextConfig
from kenotron_models.families.smollm3 import SmolLM3Config
from kenotron_models.families.starcoder2 import Starcoder2Config
from kenotron_models.families.transformers_config import TransformersConfig
from kenotron_models.families.upcycled import router_shapes, upcycled_config, upcycled_name

__all__ = [
    "DeepseekV3Config",
    "Gemma2Config",
    "Gemma3Config",
    "Glm4MoEConfig",
    "GptOssConfig",
    "GraniteHybridConfig",
    "JambaConfig",
    "LlaMoEConfig",
    "LlamaConfig",
    "Mamba2ModelConfig",
    "MambaModelConfig",
    "MistralConfig",
    "MixtralConfig",
    "MoEConfig",
    "NemotronHConfig",
    "OLMo2Config",
    "OLMo3Config",
    "OLMoEConfig",
    "Phi3Config",
    "Qwen2Config",
    "Qwen3Config",
    "Qwen3MoEConfig",
    "Qwen3NextConfig",
    "SmolLM3Config",
    "Starcoder2Config",
    "TransformersConfig",
    "router_shapes",
    "upcycled_config",
    "upcycled_name",
]
