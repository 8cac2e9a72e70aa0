"""The launcher of an engine over several pods: ``python3 -m lmcache_client.group -- vllm serve MODEL ...``.

The processes of such an engine cannot rejoin after one of them ends, and vLLM does not notice that a pod is
missing. The launcher is the first process of each engine container. Its pods form a **group**, and each pod
has a **part** of the engine. Part 0 is the leader. The launcher starts vLLM when all parts are connected, and
ends vLLM when a part is lost. Then it exits, and the kubelet restarts the container in place. Pods, sidecars
and arenas stay up, so the cache is warm after the restart.

``settings`` reads the environment and adds the options of the part to the command. ``part`` decides what
happens next, and ``channel`` authenticates the links between parts. Both are pure. ``launcher`` has the
sockets, the process of vLLM and the signals. ``__main__`` prints the cause of the end as the last line.

Guarantees:

- A loss ends vLLM on all parts. A part is lost if its vLLM exits, its link closes, or it is silent for 5 s.
  A partition of up to 3 s ends nothing. TCP sends again after 3 s, and then after 6 s, which is too late.
- A running part never connects again. So vLLM never runs with parts that joined two runs of the leader.
- The leader accepts connections only until the group is complete. Later, and while the leader ends vLLM, its
  port is closed.
- If a pod terminates, vLLM drains on all parts at once, because no rank can step without the other ranks.
  A headless vLLM would exit at once, so it gets SIGTERM after the leader's vLLM has finished its requests.
- The readiness probe connects to a port of the launcher, which is open while all parts run. A drain closes it
  in all pods. vLLM gets SIGTERM after a notice, the time for Services and proxies to remove the pods.

With hybrid load balancing each pod has an API server, so probes reach vLLM itself. If a data-parallel rank
spans all pods, only the leader has an API server, and vLLM is headless in the other pods. Their launchers
forward connections to the leader's server. So the probes of all pods have the same result.
"""
