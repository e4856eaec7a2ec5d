"""Answers to everything but watches: each verb, the reviews, discovery and health."""

import dataclasses

from starlette import responses

from mig_manager.sandbox.api import (
    access,
    calls,
    discovery,
    exchanges,
    registries,
    renderers,
    resources,
    statuses,
    stores,
)

Object = statuses.Object
Exchange = exchanges.Exchange

_OPENAPI_V2 = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"


class Verbs:
    """Carries out requests on the registry and renders what comes of them."""

    def __init__(
        self,
        store: stores.Store,
        registry: registries.Registry,
        authorizer: access.Authorizer,
    ) -> None:
        self._store = store
        self._registry = registry
        self._authorizer = authorizer

    def perform(self, exchange: Exchange) -> responses.Response:
        """Return the answer to anything but a watch.

        Raises:
            ApiError: The answer is a failure.
        """
        call = exchange.call
        if call is None:
            return self._serve_other(exchange)
        access.check(self._authorizer, access.access_of(call, exchange.token))
        renderer = exchange.renderer(call)
        if call.verb == "list":
            return exchanges.json_response(renderers.list_collection(self._store, call, renderer))
        if call.verb == "deletecollection":
            return exchanges.json_response(self._delete_collection(exchange, call, renderer))
        thing = self._act(exchange, call)
        code = 201 if call.verb == "create" else 200
        return exchanges.json_response(renderer.item(thing), code)

    def _act(self, exchange: Exchange, call: calls.Call) -> Object:
        registry, target, dry_run = self._registry, call.target, call.is_dry_run
        match call.verb:
            case "get":
                return registry.get(target)
            case "create":
                special = {"eviction": registry.evict, "binding": registry.bind}
                create = special.get(target.subresource, registry.create)
                return create(target, exchange.json(), dry_run=dry_run)
            case "update":
                return registry.update(target, exchange.json(), dry_run=dry_run)
            case "patch":
                return registry.patch(
                    target, exchange.content_type, exchange.json(), dry_run=dry_run
                )
            case _:
                options, dry_run = _delete_options(exchange, call)
                return registry.delete(target, options, dry_run=dry_run)

    def _delete_collection(
        self, exchange: Exchange, call: calls.Call, renderer: renderers.Renderer
    ) -> Object:
        selection = calls.selection(call)
        options, dry_run = _delete_options(exchange, call)
        with self._store.lock:
            things = self._store.select(selection.storage, namespace=selection.namespace)
            things = [each for each in things if selection.matches(each)]
            for thing in things:
                metadata = thing["metadata"]
                target = dataclasses.replace(
                    call.target, namespace=metadata.get("namespace", ""), name=metadata["name"]
                )
                self._registry.delete(target, options, dry_run=dry_run)
        return renderer.collection(things, {"resourceVersion": str(self._store.version)})

    def _serve_other(self, exchange: Exchange) -> responses.Response:
        path = exchange.request.url.path
        match [part for part in path.split("/") if part]:
            case ["apis", group, "v1", plural] if (group, plural) in resources.REVIEWS:
                kind = resources.REVIEWS[group, plural]
                body = _review_body(exchange, kind)
                content = access.review(kind, body, exchange.token, self._authorizer)
                return exchanges.json_response(content, 201)
            case ["openapi", "v2"]:
                # An empty document has no schemas, so that clients check nothing against it.
                return responses.Response(b"", media_type=_OPENAPI_V2)
            case _:
                pass
        if discovery.is_health(path):
            return responses.PlainTextResponse("ok")
        document = discovery.document(path)
        if document is None:
            raise statuses.no_such_path()
        return exchanges.json_response(document)


def _review_body(exchange: Exchange, kind: str) -> Object:
    """Return a review; ``kubectl`` writes them in protobuf and takes no 415 for an answer."""
    if exchange.content_type == renderers.MEDIA_TYPE:
        return renderers.read_review(exchange.body, kind)
    body: Object = exchange.json()
    return body


def _delete_options(exchange: Exchange, call: calls.Call) -> tuple[Object, bool]:
    options = exchange.json()
    if not isinstance(options, dict):
        raise statuses.bad_request("the object provided is no DeleteOptions")
    if "gracePeriodSeconds" in call.query:
        grace_s = calls.number(call.query, "gracePeriodSeconds")
        options = {"gracePeriodSeconds": grace_s} | options
    return options, call.is_dry_run or "All" in (options.get("dryRun") or ())
