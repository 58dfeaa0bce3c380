// Network is the pods' network of a cluster on one bridge, as little of it as
// these tests need. On each node it writes a CNI configuration for the node's
// own pod addresses, keeps a route to those of every other node, and hides pod
// addresses from whatever is no pod. It stands in for kindnet, whose image
// comes from a registry.
//
// It reads HOST_IP, POD_SUBNET and CONTROL_PLANE_ENDPOINT (as HOST:PORT), and
// its service account.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
)

const (
	every = 3 * time.Second
	conf  = "/etc/cni/net.d/10-kindnet.conflist"
	// The chain has kindnet's name, so that what cleans up after one does so
	// after the other.
	chain = "KIND-MASQ-AGENT"
)

func main() {
	fmt.Fprintln(os.Stderr, "network:", run())
	os.Exit(1)
}

// run goes on until it fails.
func run() error {
	config, err := rest.InClusterConfig()
	if err != nil {
		return err
	}
	// The Service of the API server works once kube-proxy does; this is earlier.
	if at := os.Getenv("CONTROL_PLANE_ENDPOINT"); at != "" {
		config.Host = "https://" + at
	}
	config.Timeout = 10 * time.Second
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return err
	}
	n := &node{address: os.Getenv("HOST_IP"), pods: os.Getenv("POD_SUBNET")}
	for tick := time.Tick(every); ; <-tick {
		list, err := nodes(client, config.Host)
		if err != nil {
			slog.Warn("cannot list the nodes; trying on", "error", err)
			continue
		}
		for _, other := range list.Items {
			if err := n.meet(other); err != nil {
				slog.Warn("cannot set up", "node", other.Name, "error", err)
			}
		}
	}
}

// nodes lists the nodes as the API server remembers them.
func nodes(client *http.Client, host string) (list corev1.NodeList, err error) {
	answer, err := client.Get(host + "/api/v1/nodes?resourceVersion=0")
	if err != nil {
		return list, err
	}
	defer func() { err = errors.Join(err, answer.Body.Close()) }()
	if answer.StatusCode != http.StatusOK {
		return list, errors.New(answer.Status)
	}
	return list, json.NewDecoder(answer.Body).Decode(&list)
}

// node is the node on which the program runs.
type node struct {
	address string
	pods    string // the addresses of all pods
	written string // the pod addresses for which all is set up
}

// meet does what one node of the cluster needs here.
func (n *node) meet(other corev1.Node) error {
	address := ""
	for _, a := range other.Status.Addresses {
		if a.Type == corev1.NodeInternalIP && address == "" {
			address = a.Address
		}
	}
	own := other.Spec.PodCIDR
	switch {
	case own == "" || address == "" || address == n.address && own == n.written:
		return nil
	case address != n.address:
		return command("ip", "route", "replace", own, "via", address)
	}
	if err := n.masquerade(); err != nil {
		return err
	}
	text := fmt.Sprintf(`{"cniVersion":"0.4.0","name":"kindnet","plugins":[
{"type":"ptp","ipMasq":false,"ipam":{"type":"host-local","dataDir":"/run/cni-ipam-state","routes":[{"dst":"0.0.0.0/0"}],"ranges":[[{"subnet":%q}]]}},
{"type":"portmap","capabilities":{"portMappings":true}}]}`, own)
	// The kubelet takes a file for finished once it is there.
	if err := os.WriteFile(conf+".tmp", []byte(text), 0o644); err != nil {
		return err
	}
	if err := os.Rename(conf+".tmp", conf); err != nil {
		return err
	}
	n.written = own
	slog.Info("the pods' network is set up", "addresses", own)
	return nil
}

// masquerade gives what leaves the pods' network the node's address.
func (n *node) masquerade() error {
	iptables := func(rule string) error {
		return command(append([]string{"iptables", "-w", "-t", "nat"}, strings.Fields(rule)...)...)
	}
	jump := "POSTROUTING -s " + n.pods + " -m addrtype ! --dst-type LOCAL -j " + chain
	_ = iptables("-N " + chain) // it may be there already
	if err := iptables("-F " + chain); err != nil {
		return err
	}
	if err := iptables("-A " + chain + " -d " + n.pods + " -j RETURN"); err != nil {
		return err
	}
	if err := iptables("-A " + chain + " -j MASQUERADE"); err != nil {
		return err
	}
	if iptables("-C "+jump) == nil {
		return nil
	}
	return iptables("-A " + jump)
}

func command(args ...string) error {
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
