"""The HTTP edge: request schemas, replies as JSON and SSE, errors, metrics."""
