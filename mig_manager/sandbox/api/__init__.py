"""The parts of the embedded Kubernetes API server; ``sandbox.apiserver`` puts them together.

From the outside in: ``asgi`` receives HTTP and answers through ``exchanges``; ``calls`` reads what
is asked, ``access`` decides who may; ``verbs`` answers all but ``watches``; ``registries`` has the
rules of each verb, with ``validation``, ``patches`` and ``budgets``; ``stores`` keeps the objects.
``renderers`` and ``tables`` give answers their form, ``events`` has two forms for one resource.
``resources``, ``selectors``, ``statuses``, ``discovery`` and ``protobuf`` are vocabulary, and
``faultbox`` makes it all fail when a test wants.
"""
