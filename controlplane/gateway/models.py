"""The models a key may use, as /v1/models lists them.

Layer: service. A model nobody may see here is not told apart from one that does not exist.
"""

from __future__ import annotations

import msgspec

from controlplane.errors import NotFoundError
from controlplane.fleet.schemas import PoolRoute
from controlplane.gateway.errors import capacity
from controlplane.gateway.fleet import FleetDirectory
from controlplane.tenants.schemas import KeyGrant


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's model object; `created` is the pool's creation in Unix seconds."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "tidegate"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[Model]


def list_models(fleet: FleetDirectory, grant: KeyGrant) -> ModelList:
    """Every served model the key may use. Raises CapacityError while the fleet is not known."""
    return ModelList(data=[_model(pool) for pool in _usable(fleet, grant)])


def one_model(fleet: FleetDirectory, grant: KeyGrant, name: str) -> Model:
    """One model. Raises NotFoundError unless the key may use it and it is served."""
    for pool in _usable(fleet, grant):
        if pool.model == name:
            return _model(pool)
    raise NotFoundError(
        f"The model {name[:100]!r} does not exist or you do not have access to it.",
        code="model_not_found",
        param="model",
    )


def _usable(fleet: FleetDirectory, grant: KeyGrant) -> list[PoolRoute]:
    if fleet.view is None:
        raise capacity("The served models are not known yet; try again.", "policy_unavailable")
    allowed = grant.allowed_models
    return [pool for pool in fleet.pools() if allowed is None or pool.model in allowed]


def _model(pool: PoolRoute) -> Model:
    return Model(id=pool.model, created=int(pool.created_at))
