package demo

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// Namespace is the Kubernetes namespace in which the demo's pods live.
const Namespace = "shop"

// member is a sample as a pod of a workload.
type member struct {
	*Sample
	Workload string
	services []string
}

// world is what the agent is told of: a file of pods in a directory, as
// kubectl would print them, and the samples that stand for the pods.
type world struct {
	file    string
	members []*member
	ip      int // last part of the newest pod's address; an address is never used twice
}

// start adds a pod that serves the services. Pods of one workload share a
// port and differ in address, as in a cluster.
func (w *world) start(workload string, services ...string) (*member, error) {
	port, n := 0, 0
	for _, m := range w.members {
		if m.Workload == workload {
			port = m.Port()
			n++
		}
	}
	name := fmt.Sprintf("%s-7d9c5-%c", workload, 'a'+n)
	var errs []error
	for w.ip = max(w.ip, 1) + 1; w.ip < 255; w.ip++ {
		s, err := StartSample(name, fmt.Sprintf("127.0.0.%d:%d", w.ip, port), services)
		if err == nil {
			m := &member{Sample: s, Workload: workload, services: services}
			w.members = append(w.members, m)
			return m, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// remove takes a pod out of the world.
func (w *world) remove(m *member) {
	for i, o := range w.members {
		if o == m {
			w.members = append(w.members[:i], w.members[i+1:]...)
			return
		}
	}
}

func (w *world) stop() {
	for _, m := range w.members {
		m.Stop()
	}
}

// podYAML takes a pod's name, workload, port and address. It is no text/template,
// which finds methods by name: the linker would have to keep every one there is.
const podYAML = `
- apiVersion: v1
  kind: Pod
  metadata:
    name: %[1]s
    namespace: ` + Namespace + `
    uid: uid-%[1]s
    labels: {pod-template-hash: 7d9c5}
    ownerReferences:
    - {apiVersion: apps/v1, kind: ReplicaSet, name: %[2]s-7d9c5, uid: uid-%[2]s, controller: true}
  spec:
    nodeName: demo
    containers:
    - name: app
      ports:
      - {name: grpc, containerPort: %[3]d}
  status:
    phase: Running
    podIP: %[4]s
    conditions:
    - {type: Ready, status: "True"}`

// write puts the file of pods in place, whole or not at all.
func (w *world) write() error {
	var b bytes.Buffer
	b.WriteString("apiVersion: v1\nkind: List\nitems:")
	if len(w.members) == 0 {
		b.WriteString(" []")
	}
	for _, m := range w.members {
		fmt.Fprintf(&b, podYAML, m.Name, m.Workload, m.Port(), m.IP())
	}
	b.WriteByte('\n')
	tmp := filepath.Join(filepath.Dir(w.file), ".pods.tmp")
	if err := os.WriteFile(tmp, b.Bytes(), 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, w.file)
}
