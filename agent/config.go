package agent

import (
	"cmp"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/fingerpost/fingerpost/agent/collect"
	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/xds/ads/socket"
	"github.com/fingerpost/fingerpost/xds/bootstrap"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// Config is what the agent was told. The zero value of a field means its
// default only where it says so.
type Config struct {
	NodeName    string // empty: the host's name, for a file source only
	Source      string // kube or file:PATH
	Kubeconfig  string // empty: in-cluster, then the usual places
	ADSSocket   string
	AdminSocket string
	Takeover    bool
	LiftTaint   bool   // from this node, once ready; see kube.StartupTaint
	HTTPAddress string // empty: no listener
	PeerAddress string // empty: off
	PeerCertDir string
	StateDir    string // empty: off
	EgressPort  int

	// Redirect lets connections of pods whose sidecar listens for them go there.
	Redirect       bool
	RedirectCgroup string // where programs are attached; empty: where the node's pods are
	RedirectDir    string // where programs and maps are pinned; empty: redirect.DefaultDir

	// CollectScope is node or cluster; empty: node, with the last resort.
	CollectScope string

	// Limits are those of the command line, as written.
	Limits schedule.Flags

	// PodName is that of this agent's pod, in LeaseNamespace; empty: unknown.
	PodName string

	// The Lease by which the writer of Events is elected.
	LeaseNamespace, LeaseName string

	Locality        string // even, zone or node
	Tracing         string // empty or otlp:HOST:PORT
	ExportDefault   string // none or all
	RequireIdentity bool
	LogFormat       string // text or json
	LogLevel        string // debug, info, warn or error

	LogTo   io.Writer // nil: standard error
	Version string    // of this build

	tune func(*collect.Options) // of tests; nil: nothing
}

// Defaults returns the configuration of an agent that was told nothing.
func Defaults() Config {
	return Config{
		Source:      "kube",
		ADSSocket:   bootstrap.DefaultADSSocket,
		AdminSocket: "/run/fingerpost-admin/admin.sock",
		HTTPAddress: "127.0.0.1:9641",
		PeerAddress: ":9642",
		StateDir:    "/var/lib/fingerpost",
		EgressPort:  resources.DefaultEgressPort,

		LeaseNamespace: "fingerpost-system",
		LeaseName:      "fingerpost-reports",

		Locality:      "even",
		ExportDefault: "none",
		LogFormat:     "text",
		LogLevel:      "info",
	}
}

// UsageError is an error in what the user said, as opposed to what the agent
// found.
type UsageError struct{ Err error }

func (e *UsageError) Error() string { return e.Err.Error() }

// Unwrap returns the error itself.
func (e *UsageError) Unwrap() error { return e.Err }

func usage(format string, args ...any) error {
	return &UsageError{Err: fmt.Errorf(format, args...)}
}

// Check returns a *UsageError for the first value that cannot work.
func (c *Config) Check() error {
	if path, ok := c.filePath(); c.Source != "kube" && !ok {
		return usage("--source %q: say kube or file:PATH", c.Source)
	} else if ok && path == "" {
		return usage("--source file: needs a path, as file:pods.yaml")
	}
	if c.Source == "kube" && c.NodeName == "" {
		return usage("--node-name is needed with --source kube: set NODE_NAME from spec.nodeName")
	}
	if c.LiftTaint && c.Source != "kube" {
		return usage("--lift-taint needs --source kube: a file has no node to take a taint off")
	}
	for _, s := range []struct{ flag, path string }{{"--ads-socket", c.ADSSocket}, {"--admin-socket", c.AdminSocket}} {
		if err := checkSocketPath(s.flag, s.path); err != nil {
			return err
		}
	}
	if err := checkSocketPath("--ads-socket", UnknownSocket(c.ADSSocket)); err != nil {
		return err
	}
	if filepath.Base(c.ADSSocket) == bootstrap.UnknownSocket {
		return usage("--ads-socket %q: the name %s beside it is taken for calls to unknown names", c.ADSSocket, bootstrap.UnknownSocket)
	}
	if filepath.Clean(c.ADSSocket) == filepath.Clean(c.AdminSocket) {
		return usage("--admin-socket is the same path as --ads-socket")
	}
	if c.EgressPort < 1 || c.EgressPort > 65535 {
		return usage("--egress-port %d: a port is 1 to 65535", c.EgressPort)
	}
	if c.EgressPort == resources.DefaultCapturePort {
		return usage("--egress-port %d: sidecars have that port for their readiness and for redirected connections; choose another", c.EgressPort)
	}
	for _, a := range []struct{ flag, addr string }{{"--http-address", c.HTTPAddress}, {"--peer-address", c.PeerAddress}} {
		if a.addr == "" {
			continue
		}
		_, port, err := net.SplitHostPort(a.addr)
		if err == nil {
			_, err = strconv.ParseUint(port, 10, 16)
		}
		if err != nil {
			return usage("%s %q: say HOST:PORT, or nothing to turn it off", a.flag, a.addr)
		}
	}
	for _, w := range []struct {
		flag, value string
		allowed     []string
	}{
		{"--collect-scope", cmp.Or(c.CollectScope, "node"), []string{"node", "cluster"}},
		{"--locality", c.Locality, []string{"even", "zone", "node"}},
		{"--export-default", c.ExportDefault, []string{"none", "all"}},
		{"--log-format", c.LogFormat, []string{"text", "json"}},
		{"--log-level", c.LogLevel, []string{"debug", "info", "warn", "error"}},
	} {
		if err := oneOf(w.flag, w.value, w.allowed); err != nil {
			return err
		}
	}
	if c.Tracing != "" {
		addr, ok := strings.CutPrefix(c.Tracing, "otlp:")
		host, text, err := net.SplitHostPort(addr)
		if port, perr := strconv.ParseUint(text, 10, 16); !ok || err != nil || host == "" || perr != nil || port == 0 {
			return usage("--tracing %q: say otlp:HOST:PORT", c.Tracing)
		}
	}
	return nil
}

func oneOf(flag, value string, allowed []string) error {
	for _, a := range allowed {
		if value == a {
			return nil
		}
	}
	return usage("%s %q: say %s", flag, value, strings.Join(allowed, " or "))
}

func checkSocketPath(flag, path string) error {
	switch {
	case path == "":
		return usage("%s is empty: it needs a path", flag)
	case len(path) > socket.MaxPath:
		return usage("%s %q is %d bytes long: a unix socket's path has at most %d", flag, path, len(path), socket.MaxPath)
	}
	return nil
}

// filePath is the path of a file source.
func (c *Config) filePath() (string, bool) { return strings.CutPrefix(c.Source, "file:") }

// nodeName is NodeName, or the host's name.
func (c *Config) nodeName() string {
	host, _ := os.Hostname() // an empty name is good enough: it matches no pod's node
	return cmp.Or(c.NodeName, host)
}

// lastResort tells whether pods of other nodes may be asked where no agent stands
// on their nodes. Who says node outright means it.
func (c *Config) lastResort() bool { return c.CollectScope == "" }

// UnknownSocket is the path of the socket at which calls to unknown names end,
// beside the ADS socket.
func UnknownSocket(adsSocket string) string {
	return filepath.Join(filepath.Dir(adsSocket), bootstrap.UnknownSocket)
}

// Logger returns the logger that the configuration asks for.
func (c *Config) Logger() *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(c.LogLevel)) // Check has seen it
	o := &slog.HandlerOptions{Level: level}
	to := c.LogTo
	if to == nil {
		to = os.Stderr
	}
	if c.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(to, o))
	}
	return slog.New(slog.NewTextHandler(to, o))
}
