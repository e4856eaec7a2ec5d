"""The contract for programs: the types of every ``-o json`` answer.

``docs/generator/schemas.py`` derives the JSON Schemas of ``mig-manager schema`` from these types,
and mypy compares them with the code that writes the answers. Within an ``apiVersion`` keys are
only added, as ``NotRequired``: an older program with the same ``apiVersion`` does not write them.
They are written in camel case, as Kubernetes has them (``json_text.in_camel_case``).
A comment behind a key becomes its description. A quoted name in ``Annotated`` names the enum or
constant with the possible values, which is not imported.
"""
