"""``kubectl mig``: the MIG layouts of a cluster's nodes, for people with a kubeconfig.

It talks to the API server by way of kubectl, and to nothing else: no node is entered, and nothing
is changed. What it shows is what the agents publish on their nodes.
"""
