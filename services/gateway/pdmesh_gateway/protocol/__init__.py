"""Requests and answers of OpenAI's and vLLM's APIs, as msgspec structs.

The structs have the fields that affect an answer, and known fields without effect. `pdmesh_gateway.http.unknown`
handles all others. `pdmesh_gateway.sampling` checks ranges, so that every refusal names its field.
"""
