"""Reads what a model folder says about its tokenizer: vocabulary, settings, templates, end marks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwire_protocol.errors import ConfigInvalid, ModelLoadFailed


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one where there is no file. Raises ModelLoadFailed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelLoadFailed(f"{path} cannot be read: {error}.", hint="Fetch the model's folder again.") from None
    return value if isinstance(value, dict) else {}


def read_backend(folder: Path, settings: Mapping[str, Any]) -> Any:
    """Make the `tokenizers.Tokenizer` of a folder, with the tokens that only its settings know.

    Raises ModelLoadFailed.
    """
    file = folder / "tokenizer.json"
    if file.is_file():
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Backend

        try:
            backend = Backend.from_file(str(file))
        except Exception as error:
            raise ModelLoadFailed(f"{file} is no tokenizer: {error}.", hint="Fetch the folder again.") from None
        for index, entry in sorted(settings.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
            if backend.token_to_id(entry["content"]) is None:
                if backend.get_vocab_size() != int(index):
                    break
                known = ("lstrip", "rstrip", "single_word", "normalized", "special")
                backend.add_tokens([AddedToken(entry["content"], **{k: entry[k] for k in known if k in entry})])
        return backend
    return _converted_backend(folder)


def _converted_backend(folder: Path) -> Any:
    """Let transformers convert an older kind of tokenizer; importing it costs seconds."""
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    except Exception as error:
        raise ModelLoadFailed(
            f"{folder} has no tokenizer.json, and no tokenizer could be made from its other files: {error}",
            hint="A model folder needs tokenizer.json next to config.json.",
        ) from None


def read_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Every template of a folder by name; a .jinja file wins over the settings."""
    templates: dict[str, str] = {}
    for source in (read_json(folder / "chat_template.json").get("chat_template"), settings.get("chat_template")):
        if isinstance(source, str):
            templates["default"] = source
        elif isinstance(source, list):
            templates.update((entry["name"], entry["template"]) for entry in source)
    if (folder / "chat_template.jinja").is_file():
        templates = {"default": (folder / "chat_template.jinja").read_text(encoding="utf-8")}
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates


def chosen_template(given: str, templates: Mapping[str, str]) -> str:
    """Give the template that a config asks for: a text, a file, or the name of one. Raises ConfigInvalid."""
    if "{" in given:
        return given
    path = Path(given)
    if path.name in templates and not path.is_file():
        return templates[path.name]
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        named = f" The model's own are named {', '.join(sorted(templates))}." if templates else ""
        raise ConfigInvalid(
            f"chat_template = {given!r} is neither a template nor a file that can be read: {error}.{named}",
            hint="Write the template's text, or the path of a .jinja file.",
        ) from None


def model_eos_ids(folder: Path) -> list[int]:
    """Ids of the tokens that end a generation, as the model's own files name them."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        if value is not None:
            return [int(i) for i in value] if isinstance(value, list) else [int(value)]
    return []
