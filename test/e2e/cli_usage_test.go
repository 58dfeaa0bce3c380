package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// runWith is run with more environment.
func runWith(t *testing.T, env []string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr, cmd.Env = &out, &errs, append(os.Environ(), env...)
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("fingerpost %s: %v", strings.Join(args, " "), err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// refused runs a command that must end with the code and one line on standard
// error, which holds the text, and nothing else.
func refused(t *testing.T, code int, text string, env []string, args ...string) {
	t.Helper()
	out, errs, got := runWith(t, env, args...)
	if got != code || out != "" || strings.Count(errs, "\n") != 1 || !strings.HasSuffix(errs, "\n") ||
		!strings.HasPrefix(errs, "fingerpost: ") || !strings.Contains(errs, text) {
		t.Errorf("fingerpost %s: exit %d, stdout %q, stderr %q; want exit %d and one line with %q", strings.Join(args, " "), got, out, errs, code, text)
	}
}

func (s *site) wantNoSockets(t *testing.T) {
	t.Helper()
	for _, path := range []string{s.ads, s.admin, filepath.Join(filepath.Dir(s.ads), "unknown.sock")} {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s is left behind", path)
		}
	}
}

const podWithoutUID = `
apiVersion: v1
kind: Pod
metadata: {name: web-1-a, namespace: prod}
status: {phase: Running, podIP: 127.0.0.9}
`

func TestAgentThatCannotStartSaysWhyInOneLine(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good := "file:" + put("good.yaml", "apiVersion: v1\nkind: List\nitems: []\n")
	long := filepath.Join(dir, strings.Repeat("x", 107), "ads.sock")
	if err := os.Mkdir(filepath.Join(dir, "empty"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		args []string
		env  []string
		code int
		text string
	}{
		"missing file":        {args: []string{"--source", "file:" + dir + "/none.yaml"}, code: 1, text: dir + "/none.yaml"},
		"broken YAML":         {args: []string{"--source", "file:" + put("broken.yaml", "kind: [\na: b: c\n")}, code: 1, text: "broken.yaml"},
		"broken JSON":         {args: []string{"--source", "file:" + put("broken.json", "{\n\"kind\": ")}, code: 1, text: "broken.json"},
		"no object":           {args: []string{"--source", "file:" + put("list.yaml", "- a\n- b\n")}, code: 1, text: "list.yaml"},
		"empty file":          {args: []string{"--source", "file:" + put("empty.yaml", "")}, code: 1, text: "empty.yaml"},
		"empty directory":     {args: []string{"--source", "file:" + filepath.Join(dir, "empty")}, code: 1, text: "items: []"},
		"Pod without UID":     {args: []string{"--source", "file:" + put("nouid.yaml", podWithoutUID)}, code: 1, text: "prod/web-1-a"},
		"directory is a file": {args: []string{"--source", good, "--ads-socket", put("file", "x") + "/ads.sock"}, code: 1, text: "is a file"},
		"admin's is a file":   {args: []string{"--source", good, "--admin-socket", put("file2", "x") + "/a/admin.sock"}, code: 1, text: "is a file"},
		"socket is a file":    {args: []string{"--source", good, "--ads-socket", put("ads.sock", "x")}, code: 1, text: "is a file"},
		"long socket path":    {args: []string{"--source", good, "--ads-socket", long}, code: 2, text: "107"},
		"long admin path":     {args: []string{"--source", good, "--admin-socket", long}, code: 2, text: "107"},
		"one path for both":   {args: []string{"--source", good, "--ads-socket", "/tmp/x.sock", "--admin-socket", "/tmp/./x.sock"}, code: 2, text: "--admin-socket"},
		"no kubeconfig":       {args: []string{"--source", "kube", "--kubeconfig", dir + "/none"}, code: 1, text: dir + "/none"},

		"unknown flag":       {args: []string{"--no-such-flag"}, code: 2, text: "--no-such-flag"},
		"argument":           {args: []string{"something"}, code: 2, text: "something"},
		"--source":           {args: []string{"--source", "etcd"}, code: 2, text: "--source"},
		"--source file:":     {args: []string{"--source", "file:"}, code: 2, text: "--source"},
		"no node name":       {args: []string{"--source", "kube", "--node-name", ""}, env: []string{"NODE_NAME="}, code: 2, text: "--node-name"},
		"--egress-port 0":    {args: []string{"--egress-port", "0"}, code: 2, text: "--egress-port"},
		"--egress-port big":  {args: []string{"--egress-port", "65536"}, code: 2, text: "--egress-port"},
		"--egress-port text": {args: []string{"--egress-port", "x"}, code: 2, text: "--egress-port"},
		"--http-address":     {args: []string{"--http-address", "9641"}, code: 2, text: "--http-address"},
		"--peer-address":     {args: []string{"--peer-address", "host"}, code: 2, text: "--peer-address"},
		"--collect-scope":    {args: []string{"--collect-scope", "zone"}, code: 2, text: "--collect-scope"},
		"--locality":         {args: []string{"--locality", "odd"}, code: 2, text: "--locality"},
		"--export-default":   {args: []string{"--export-default", "some"}, code: 2, text: "--export-default"},
		"--log-format":       {args: []string{"--log-format", "xml"}, code: 2, text: "--log-format"},
		"--log-level":        {args: []string{"--log-level", "loud"}, code: 2, text: "--log-level"},
		"--tracing":          {args: []string{"--tracing", "zipkin:127.0.0.1:1"}, code: 2, text: "--tracing"},
		"--tracing no port":  {args: []string{"--tracing", "otlp:host"}, code: 2, text: "--tracing"},
		"--takeover":         {args: []string{"--takeover=maybe"}, code: 2, text: `--takeover "maybe": say true or false`},
		"--lift-taint":       {args: []string{"--lift-taint"}, code: 2, text: "--lift-taint"},
		"--require-identity": {args: []string{"--require-identity=maybe"}, code: 2, text: "--require-identity"},
		"empty socket path":  {args: []string{"--ads-socket", ""}, code: 2, text: "--ads-socket"},

		"FINGERPOST_TAKEOVER":   {env: []string{"FINGERPOST_TAKEOVER=perhaps"}, code: 2, text: `FINGERPOST_TAKEOVER="perhaps": say true or false`},
		"FINGERPOST_LOCALITY":   {env: []string{"FINGERPOST_LOCALITY=odd"}, code: 2, text: "odd"},
		"FINGERPOST_LOG_FORMAT": {env: []string{"FINGERPOST_LOG_FORMAT="}, code: 2, text: "--log-format"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			args := test.args
			if !strings.Contains(strings.Join(args, " "), "--source") {
				args = append(args, "--source", good)
			}
			refused(t, test.code, test.text, test.env, s.args(args...)...)
			s.wantNoSockets(t)
		})
	}
	for _, flag := range []string{"--collect-limit", "--peer-fetch-limit", "--transcode-limit", "--work-limit"} {
		for _, value := range []string{"0", "-1", "x", "1.5", ""} {
			t.Run(flag+"="+value, func(t *testing.T) {
				s := newSite(t)
				refused(t, 2, flag, nil, s.args("--source", good, flag+"="+value)...)
				s.wantNoSockets(t)
			})
		}
	}
}

func TestBadLimitInTheEnvironmentIsOneWarning(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	cmd := exec.Command(program, s.args("--source", w.write().source())...)
	cmd.Env = append(os.Environ(), "FINGERPOST_COLLECT_LIMIT=many", "FINGERPOST_WORK_LIMIT=100")
	a := s.launch(t, cmd).ready()
	if n := strings.Count(a.log.String(), "FINGERPOST_COLLECT_LIMIT"); n != 1 {
		t.Errorf("%d lines name the variable, want 1:\n%s", n, a.log)
	}
	if n := strings.Count(a.log.String(), "level=WARN"); n != 1 {
		t.Errorf("%d warnings, want 1:\n%s", n, a.log)
	}
}

func TestEveryFlagOfTheAgentParsesAndIsListed(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	dir := t.TempDir()
	flags := []string{
		"--node-name=n7", "--source=" + w.write().source(), "--kubeconfig=" + dir + "/none",
		"--ads-socket=" + s.ads, "--admin-socket=" + s.admin, "--takeover",
		"--http-address=127.0.0.1:0", "--peer-address=127.0.0.1:0", "--peer-cert-dir=" + dir, "--state-dir=" + dir,
		"--egress-port=15001", "--collect-scope=node",
		"--collect-limit=1", "--peer-fetch-limit=2", "--transcode-limit=3", "--work-limit=1000",
		"--locality=zone", "--tracing=otlp:127.0.0.1:4317", "--export-default=all", "--require-identity",
		"--redirect", "--redirect-cgroup=" + dir, "--redirect-dir=" + dir + "/pins",
		"--log-format=json", "--log-level=debug",
	}
	help, errs, code := run(t, "agent", "--help")
	if code != 0 || errs != "" {
		t.Errorf("agent --help: exit %d, %q", code, errs)
	}
	for _, f := range flags {
		name, _, _ := strings.Cut(f, "=")
		if !strings.Contains(help, name+" ") {
			t.Errorf("agent --help does not list %s", name)
		}
	}
	a := s.launch(t, exec.Command(program, append([]string{"agent"}, flags...)...)).ready()
	st := a.status()
	if st.Node != "n7" {
		t.Errorf("status names the node %q", st.Node)
	}
	for part, state := range st.Parts {
		if state != "on" && !strings.HasPrefix(state, "off: ") && part != "locality" && part != "export" {
			t.Errorf("part %s is %q, want on or off: reason", part, state)
		}
	}
	for _, part := range []string{"peers", "checkpoint", "takeover", "identity", "redirect", "http", "tracing"} {
		if st.Parts[part] == "" {
			t.Errorf("status does not speak of %s: %v", part, st.Parts)
		}
	}
	for line := range strings.Lines(a.log.String()) {
		if !json.Valid([]byte(line)) {
			t.Errorf("with --log-format=json a line is %q", line)
		}
	}

	// The same by the environment, where a flag goes before its variable.
	a.stop()
	cmd := exec.Command(program, "agent", "--node-name=n8")
	cmd.Env = os.Environ()
	for _, f := range flags {
		name, value, ok := strings.Cut(f, "=")
		if !ok {
			value = "true"
		}
		cmd.Env = append(cmd.Env, "FINGERPOST_"+strings.ToUpper(strings.ReplaceAll(strings.TrimPrefix(name, "--"), "-", "_"))+"="+value)
	}
	if st := s.launch(t, cmd).ready().status(); st.Node != "n8" || st.Parts["tracing"] != "on" {
		t.Errorf("status of the agent that was set by its environment: %+v", st)
	}
}

func TestBootstrapChecksItsFlagsAndPrintsWhatParses(t *testing.T) {
	t.Parallel()
	for name, args := range map[string][]string{
		"sotw with on-demand": {"--format", "envoy", "--node-id", "prod/a", "--api", "sotw", "--clusters", "on-demand"},
		"no format":           {"--node-id", "prod/a"},
		"format":              {"--format", "nginx", "--node-id", "prod/a"},
		"api":                 {"--format", "envoy", "--node-id", "prod/a", "--api", "rest"},
		"clusters":            {"--format", "envoy", "--node-id", "prod/a", "--clusters", "few"},
		"no node id":          {"--format", "envoy"},
		"node id":             {"--format", "envoy", "--node-id", "a"},
		"namespace":           {"--format", "envoy", "--node-id", "Prod/a"},
		"long socket path":    {"--format", "envoy", "--node-id", "prod/a", "--ads-socket", "/" + strings.Repeat("x", 107)},
		"relative socket":     {"--format", "envoy", "--node-id", "prod/a", "--ads-socket", "ads.sock"},
		"unknown flag":        {"--format", "envoy", "--what"},
	} {
		t.Run(name, func(t *testing.T) {
			refused(t, 2, "", []string{"POD_NAMESPACE=", "POD_NAME="}, append([]string{"bootstrap"}, args...)...)
		})
	}
	for _, args := range [][]string{{"--api", "delta"}, {"--api", "sotw"}, {"--api", "sotw", "--clusters", "all"}, {"--admin-socket-envoy", "/tmp/envoy.sock"}} {
		out, errs, code := run(t, append([]string{"bootstrap", "--format", "envoy", "--node-id", "prod/a-1", "--ads-socket", "/run/x/ads.sock"}, args...)...)
		var conf struct {
			Node             struct{ ID string }
			DynamicResources map[string]any `json:"dynamic_resources"`
			StaticResources  map[string]any `json:"static_resources"`
		}
		if err := yaml.Unmarshal([]byte(out), &conf); err != nil || code != 0 || errs != "" {
			t.Fatalf("bootstrap %v: exit %d, %q, %v", args, code, errs, err)
		}
		if conf.Node.ID != "prod/a-1" || conf.DynamicResources["ads_config"] == nil || !strings.Contains(out, "/run/x/ads.sock") {
			t.Errorf("bootstrap %v: %s", args, out)
		}
	}
	out, errs, code := runWith(t, []string{"POD_NAMESPACE=prod", "POD_NAME=a-2"}, "bootstrap", "--format", "grpc")
	var conf struct {
		Servers []struct {
			URI string `json:"server_uri"`
		} `json:"xds_servers"`
		Node struct{ ID string }
	}
	if err := json.Unmarshal([]byte(out), &conf); err != nil || code != 0 || errs != "" {
		t.Fatalf("bootstrap --format grpc: exit %d, %q, %v", code, errs, err)
	}
	if conf.Node.ID != "prod/a-2" || len(conf.Servers) != 1 || !strings.HasPrefix(conf.Servers[0].URI, "unix:") {
		t.Errorf("bootstrap --format grpc: %s", out)
	}
}

func TestVersionAndUnknownCommands(t *testing.T) {
	t.Parallel()
	out, errs, code := run(t, "version")
	if code != 0 || errs != "" || !strings.HasPrefix(out, "fingerpost ") || strings.Count(out, "\n") != 1 {
		t.Errorf("version: exit %d, %q, %q", code, out, errs)
	}
	refused(t, 2, "no-such-command", nil, "no-such-command")
	refused(t, 2, "no-such-command", nil, "help", "no-such-command")
	refused(t, 2, "explain nothing", nil, "help", "explain", "nothing")
	refused(t, 2, "tcsh", nil, "completion", "tcsh")
	refused(t, 2, "--admin-socket is empty", nil, "paths", "--admin-socket", "")
	refused(t, 2, "--redirect needs --format envoy", nil, "bootstrap", "--format", "grpc", "--redirect", "--node-id", "prod/web")
	refused(t, 2, `FINGERPOST_TIMEOUT="soon": say a duration`, []string{"FINGERPOST_TIMEOUT=soon"}, "wait", "--service", "shop.Web")
	refused(t, 2, `FINGERPOST_EGRESS_PORT="x": say a whole number`, []string{"FINGERPOST_EGRESS_PORT=x"}, "agent")
	if out, errs, code := run(t, "help", "explain", "call"); code != 0 || errs != "" || !strings.Contains(out, "--authority") {
		t.Errorf("help explain call: exit %d, %q, %q", code, out, errs)
	}
	refused(t, 2, "more", nil, "version", "more")
	refused(t, 2, "node", nil, "explain", "node", "x")
	refused(t, 2, "NAMESPACE/NAME", nil, "explain", "pod", "web")
	refused(t, 2, "", nil, "explain", "service")
	refused(t, 2, "xml", nil, "status", "-o", "xml")
	refused(t, 2, "--type", nil, "xds", "get")
	refused(t, 2, "secrets", nil, "xds", "get", "--type", "secrets")
	refused(t, 2, "yaml", nil, "xds", "get", "--type", "clusters", "-o", "yaml")
	refused(t, 2, "--node-id", nil, "xds", "get", "--type", "clusters", "--node-id", "web")
}
