"""The scheduler's side of the WorkerService: from configured addresses to one connected rank each.

pool.py      addresses -> one client each; names are resolved again and again
client.py    asyncio around one session: dial, open, send, receive, wait
session.py   what one worker's session means, as a state machine without I/O (window.py: its unacknowledged steps)
transport.py the network as clients see it; grpc_transport.py and resolver.py stand behind it
"""
