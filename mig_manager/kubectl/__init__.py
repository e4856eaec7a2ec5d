"""``kubectl mig``: the MIG layouts of a cluster's nodes, for people with a kubeconfig.

It uses the API server only through kubectl and needs no access to a node. It shows what agents
publish on their nodes; only ``apply`` and ``top`` can request layouts.
"""
