"""What can be wrong with a config's values by themselves: told before the model is loaded and the data is read."""

from __future__ import annotations

from collections.abc import Sequence

from trainwire_engine.boundary import check_display
from trainwire_engine.generate import Prompt, prompt_tokens, read_prompts
from trainwire_engine.optimizer import Optimizer
from trainwire_engine.tokenizer import Tokenizer
from trainwire_protocol.config import Config
from trainwire_protocol.errors import BadParams, ConfigInvalid


def check_values(config: Config) -> list[Prompt]:
    """Check what needs neither model nor data, and read the prompts; raises ConfigInvalid."""
    Optimizer(config)
    prompts = read_prompts(config.prompts)
    try:
        check_display(config.sample_display, prompts)
    except BadParams as error:
        raise _unusable(error) from None
    if config.generate_every and not prompts:
        raise ConfigInvalid(
            f"generate_every = {config.generate_every} has no effect without prompts.",
            hint="Give prompts, or leave generate_every out.",
            key="generate_every",
        )
    return prompts


def try_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> None:
    """Try each prompt on the template; raises ConfigInvalid."""
    try:
        for prompt in prompts:
            if not prompt_tokens(tokenizer, prompt):
                raise BadParams("A prompt is empty.")
    except BadParams as error:
        raise _unusable(error) from None


def _unusable(error: BadParams) -> ConfigInvalid:
    return ConfigInvalid(f"prompts: {error.message}", hint=error.hint, key="prompts")
