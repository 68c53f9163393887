"""The HTTP edge's vocabulary: what OpenAI's and vLLM's clients send and get, as msgspec structs.

Fields that we honour are here, and those that change nothing. What becomes of others says
`pdmesh_gateway.http.unknown`. Ranges are checked in `pdmesh_gateway.sampling`, so that every refusal names its field.
"""
