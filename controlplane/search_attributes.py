"""Registers everstep's search attributes with a Temporal server."""

from __future__ import annotations

from typing import Any, cast

import structlog
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import Client
from temporalio.common import SearchAttributeKey
from temporalio.service import RPCError, RPCStatusCode

from workflows import attributes

log = structlog.get_logger("worker")


async def register(client: Client) -> None:
    """Add missing attributes. If the server refuses, an error in the log has the command for the server's operator."""
    try:
        listed = await client.operator_service.list_search_attributes(
            ListSearchAttributesRequest(namespace=client.namespace)
        )
        missing = [key for key in attributes.ALL if key.name not in listed.custom_attributes]
        if missing:
            await client.operator_service.add_search_attributes(
                AddSearchAttributesRequest(
                    namespace=client.namespace,
                    search_attributes={key.name: wire_type(key) for key in missing},
                )
            )
    except RPCError as error:
        if error.status is RPCStatusCode.ALREADY_EXISTS:
            return
        wanted = " ".join(f"--name {key.name} --type {type_name(key)}" for key in attributes.ALL)
        log.error(
            "search attributes could not be registered: workflows wait until the command below has registered them",
            error=str(error),
            command=f"temporal operator search-attribute create {wanted}",
        )


def wire_type(key: SearchAttributeKey[Any]) -> IndexedValueType.ValueType:
    """The type of an attribute in the API for operators, whose numbers equal those of the SDK's enum."""
    return cast("IndexedValueType.ValueType", int(key.indexed_value_type))


def type_name(key: SearchAttributeKey[Any]) -> str:
    """``KeywordList`` for INDEXED_VALUE_TYPE_KEYWORD_LIST, as the temporal command accepts it."""
    return IndexedValueType.Name(wire_type(key)).removeprefix("INDEXED_VALUE_TYPE_").title().replace("_", "")
