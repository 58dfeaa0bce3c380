package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/fingerpost/fingerpost/agent"
	"github.com/fingerpost/fingerpost/xds/ads/socket"
)

// adminTimeout bounds a question to the agent on this node.
const adminTimeout = 10 * time.Second

// adminFlags are the flags of every command that asks the agent.
type adminFlags struct {
	socket string
	output string
}

func (a *adminFlags) add(cmd *cobra.Command) {
	a.addSocket(cmd)
	cmd.Flags().StringVarP(&a.output, "output", "o", "table", "table, json or yaml")
	complete(cmd, "output", "table", "json", "yaml")
}

func (a *adminFlags) addSocket(cmd *cobra.Command) {
	cmd.Flags().StringVar(&a.socket, "admin-socket", agent.Defaults().AdminSocket, "`path` of the agent's admin socket; in an agent's container that of the agent itself")
}

// show asks the agent for path, and prints the answer as it came, as YAML, or
// as the table that the function makes of it.
func show[T any](cmd *cobra.Command, a *adminFlags, path string, query url.Values, rows func(*table, T)) (T, error) {
	var v T
	if err := a.check(); err != nil {
		return v, err
	}
	body, err := ask(cmd.Context(), a.socket, path, query)
	if err != nil {
		return v, err
	}
	return present(cmd, a, body, rows)
}

// check refuses flags that no command could follow.
func (a *adminFlags) check() error {
	switch a.output {
	case "table", "json", "yaml":
		return nil
	}
	return usageError("--output %q: say table, json or yaml", a.output)
}

// present prints an answer as show does.
func present[T any](cmd *cobra.Command, a *adminFlags, body []byte, rows func(*table, T)) (v T, err error) {
	if err := json.Unmarshal(body, &v); err != nil {
		return v, fmt.Errorf("the agent's answer is not understood (another version?): %w", err)
	}
	out := cmd.OutOrStdout()
	switch a.output {
	case "json":
		var indented bytes.Buffer
		if err := json.Indent(&indented, body, "", "  "); err != nil {
			return v, err
		}
		_, err = fmt.Fprintln(out, strings.TrimSpace(indented.String()))
	case "yaml":
		if body, err = yaml.JSONToYAML(body); err == nil {
			_, err = out.Write(body)
		}
	default:
		w := newTable(out)
		rows(w, v)
		err = w.flush()
	}
	return v, err
}

// ask gets path from the agent at the admin socket.
func ask(ctx context.Context, admin, path string, query url.Values) ([]byte, error) {
	return request(ctx, http.MethodGet, admin, path, query, adminTimeout)
}

// request sends a request without a body to the agent at the admin socket, and
// returns what it answers within the timeout.
func request(ctx context.Context, method, admin, path string, query url.Values, timeout time.Duration) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if admin == "" {
		return nil, usageError("--admin-socket is empty: it needs a path")
	}
	admin = agent.OwnAdminSocket(admin)
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return socket.Dial(ctx, admin)
		},
	}}
	u := url.URL{Scheme: "http", Host: "agent", Path: path, RawQuery: query.Encode()}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, unreachable(admin, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("read the agent's answer: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		var r agent.Readiness
		if json.Unmarshal(body, &r) == nil {
			return nil, errors.New("not ready: " + r.Reason)
		}
		return nil, errors.New(strings.TrimSpace(string(body)))
	}
	return body, nil
}

func unreachable(socket string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("no agent at %s: there is no such socket; is the agent running, and is --admin-socket right?", socket)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("no agent at %s: nobody answers there; the agent may have died", socket)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("no right to open %s: run as the user of the agent", socket)
	}
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err
	}
	return fmt.Errorf("ask the agent at %s: %w; is --admin-socket right?", socket, err)
}
