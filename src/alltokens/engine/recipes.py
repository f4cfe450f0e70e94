"""Where settings come from: the packaged recipes, one's own files, and what is laid over them.

A recipe is one YAML file of settings. `extends: NAME`, one level deep, names the recipe that it starts from: a file
beside it, or a packaged one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from alltokens.engine.config import RecipeCard, RunConfig
from alltokens.engine.loading import build, read_yaml
from alltokens.errors import UserError, unknown

_ENDINGS = (".yaml", ".yml")


def packaged_recipes() -> dict[str, Path]:
    """Name -> file of each recipe that comes with the package."""
    folder = Path(str(resources.files("alltokens") / "recipes"))
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def load_recipe(name_or_path: str | Path) -> RunConfig:
    """The settings of a packaged recipe, or of a YAML file."""
    file = find_recipe(name_or_path)
    values = read_yaml(file)
    if "extends" not in values:
        return overlay(RunConfig(), values, str(file))
    name = values.pop("extends")
    if not isinstance(name, str):
        raise UserError(f"{file}: extends: expected the name of one recipe, got {name!r}")
    base_file = _find_base(name, file)
    base_values = read_yaml(base_file)
    if "extends" in base_values:
        raise UserError(
            f"{file}: extends {name!r}, which itself extends {base_values['extends']!r}; only one level is allowed. "
            f"Extend {base_values['extends']!r} and write the settings of {name!r} out"
        )
    base = overlay(RunConfig(), base_values, str(base_file))
    # What a recipe promises holds for that recipe alone.
    return overlay(replace(base, about=RecipeCard()), values, str(file))


def overlay(config: RunConfig, values: Mapping[str, Any], where: str) -> RunConfig:
    """`config` with `values` laid over it.

    `model.options` merge key by key, since they describe one model together; with another `model.name` they start
    anew, because options of one architecture would silently bend or break the other.
    """
    laid = build(RunConfig, values, where, config)
    if laid.model.name != config.model.name:
        kept: dict[str, Any] = {}
    else:
        kept = config.model.options
    given = values.get("model", {}).get("options", {})
    return replace(laid, model=replace(laid.model, options={**kept, **given}))


def recipe_name(name_or_path: str | Path) -> str:
    """What a run of this recipe is called: the file's name without its ending."""
    text = str(name_or_path)
    return Path(text).stem if text.endswith(_ENDINGS) else Path(text).name


def find_recipe(name_or_path: str | Path) -> Path:
    """The file of a recipe. A word is a packaged recipe; what ends in .yaml is a path."""
    packaged = packaged_recipes()
    text = str(name_or_path)
    if text in packaged:
        return packaged[text]
    path = Path(text)
    if not text.endswith(_ENDINGS):
        hint = f"A recipe of one's own is a path that ends in .yaml: {path.name}.yaml." if path.name else ""
        raise unknown("recipe", text, packaged, hint)
    if not path.is_file():
        beside = [str(file) for ending in _ENDINGS for file in path.parent.glob(f"*{ending}")]
        hint = "Packaged recipes are called without .yaml; `alltokens recipes` lists them."
        if not beside:
            raise UserError(f"unknown recipe file {text!r}: there is no .yaml file in {path.parent}. {hint}")
        raise unknown("recipe file", text, beside, hint)
    return path


def _find_base(name: str, file: Path) -> Path:
    packaged = packaged_recipes()
    beside = {other.stem: other for ending in _ENDINGS for other in file.parent.glob(f"*{ending}") if other != file}
    named = file.parent / name
    if name.endswith(_ENDINGS) and named.is_file():
        return named
    found = beside.get(name) or packaged.get(name)
    if found is None:
        raise unknown("recipe", name, {**packaged, **beside}, f"(extended by {file})")
    return found
