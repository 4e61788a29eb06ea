"""Which sizes of a LitGPT model an axis must divide. Pure arithmetic: asked before anything is imported or built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axo.errors import Refused
from axo.grid import Grid
from axo.placement import check_divides
from axo.plans.heads import kv_copies


def check_model(config: Mapping[str, Any], grid: Grid, inner: str) -> None:
    """Refuse sizes that do not divide, where there is no model yet.

    Args:
        config, grid, inner: As for :func:`check_sizes`.

    Raises:
        Refused: As the plan does for the model.
    """
    width = "intermediate_size"
    if config["mlp_class_name"] == "LLaMAMoE" and config["moe_intermediate_size"]:
        width = "moe_intermediate_size"
    check_sizes(owner_of(config), config, {width: config[width]}, grid, inner)


def owner_of(config: Mapping[str, Any]) -> str:
    """A model, as messages call it."""
    return f"parallelize: litgpt model {config['name'] or 'unnamed'!r}"


def check_sizes(owner: str, config: Mapping[str, Any], widths: Mapping[str, int], grid: Grid, inner: str) -> None:
    """Refuse sizes that do not divide.

    Args:
        owner: The model, as messages call it.
        config: Fields of the model's ``litgpt.Config``.
        widths: The widths of its MLPs, by the name of the field.
        grid: The grid.
        inner: The axis that splits heads and MLPs (``axo.arrangement``).

    Raises:
        Refused: Names the size, the axis, and what would work.
    """
    ranks, heads, groups = grid.size(inner), config["n_head"], config["n_query_groups"]

    def fits(x: int) -> bool:
        return not any(size % x for size in (heads, *widths.values())) and not (groups % x and x % groups)

    if config["latent_attention"]:
        for what in ("q_lora_rank", "kv_lora_rank"):
            check_divides(owner, what, config["latent_attention"][what], "y", grid.y)
    for what, size in {**widths, "n_head": heads}.items():
        check_divides(owner, what, size, inner, ranks, fits)
    check_divides(owner, "n_embd", config["n_embd"], "y", grid.y)
    copies = kv_copies(owner, "n_query_groups", groups, ranks, fits, inner)
    if copies > 1 and config["norm_qk"] and config["norm_qk_type"] == "olmo2":
        raise Refused(
            f"{owner}: a norm over all heads' keys (norm_qk_type='olmo2') with n_query_groups={groups}"
            f" shared by {inner}={ranks} ranks is not supported; use at most {inner}={groups}"
        )
