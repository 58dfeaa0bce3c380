package main

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fingerpost/fingerpost/agent"
)

// recollectTimeout is longer than the agent waits for an answer.
const recollectTimeout = 40 * time.Second

func newRecollect() *cobra.Command {
	var a adminFlags
	cmd := &cobra.Command{
		Use:   "recollect OWNER",
		Short: "Ask an owner at once what it serves",
		Long: `Ask an owner at once what it serves, whatever is known of it and whatever waits
its last failure imposed. OWNER is its key, UID/REVISION, as fingerpost owners
-o json shows it, or NAMESPACE/NAME of the owner or its workload; of a workload,
every revision that has pods is asked. The limit of connections to a port holds:
no more than five within an hour.

Exit code 1 if an owner did not answer. What was known of it stands then.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if first, rest, ok := strings.Cut(args[0], "/"); !ok || first == "" || strings.Count(rest, "/") > 1 {
				return usageError("%q is neither UID/REVISION nor NAMESPACE/NAME of an owner", args[0])
			}
			if err := a.check(); err != nil {
				return err
			}
			body, err := request(cmd.Context(), http.MethodPost, a.socket, "/recollect", url.Values{"owner": args}, recollectTimeout)
			if err != nil {
				return err
			}
			rows, err := present(cmd, &a, body, recollectTable)
			if err != nil {
				return err
			}
			var failed []string
			for _, r := range rows {
				if r.Report.Result != "known" && r.Report.Result != "none" {
					failed = append(failed, fmt.Sprintf("%s was not collected: %s", r.Owner.Name, cmp.Or(r.Report.Detail, r.Report.Result)))
				}
			}
			if len(failed) > 0 {
				return errors.New(plain(strings.Join(failed, "; ")))
			}
			return nil
		},
	}
	a.add(cmd)
	return cmd
}

func recollectTable(w *table, rows []agent.Recollected) {
	w.row("NAMESPACE", "OWNER", "RESULT", "POD", "SERVICES", "REASON")
	for _, r := range rows {
		w.row(r.Owner.Namespace, r.Owner.Name, r.Report.Result, r.Report.Pod, some(r.Owner.Services), r.Report.Detail)
	}
}
