"""Any program can be a worker: the task's input comes as JSON on stdin, the last line printed is the result."""

import json
import os
import sys

document = json.load(sys.stdin)
print("working on", os.environ["FENCEPOST_TASK_ID"], file=sys.stderr)
words = document["text"].split()  # your agent's hour of work
print(json.dumps({"words": len(words), "longest": max(words, key=len)}))
