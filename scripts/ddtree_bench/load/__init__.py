"""The load client: what is sent (prompts), when (closed_loop), and what is recorded (client, sse, requests_table)."""
