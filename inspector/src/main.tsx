// The page: reads what the source is, then shows the view that the address names.
import { render } from "preact";
import { useEffect } from "preact/hooks";
import { Problem, Waiting } from "./parts/small";
import { Shell } from "./parts/shell";
import { route } from "./route";
import { applyTheme, loadSource, source, sourceError, theme } from "./state";
import { GroupView } from "./views/group";
import { JobView } from "./views/job";
import { RolloutView } from "./views/rollout";
import { SearchView } from "./views/search";
import { TrajectoryView } from "./views/trajectory";
import "./style/base.css";
import "./style/job.css";
import "./style/rollout.css";
import "./style/tokens.css";

function View() {
  const at = route.value;
  if (sourceError.value) return <Problem error={sourceError.value} />;
  if (source.value === null) return <Waiting what="the source" />;
  switch (at.view) {
    case "job":
      return <JobView query={at.query} />;
    case "search":
      return <SearchView query={at.query} />;
    case "group":
      return <GroupView key={at.group} group={at.group} />;
    case "rollout":
      return <RolloutView key={at.rollout} rollout={at.rollout} call={at.call} />;
    case "trajectory":
      return <TrajectoryView key={`${at.rollout} ${at.trajectory}`} {...at} />;
    case "unknown":
      return <Problem error={`There is no page ${at.path}. All rollouts are at #/`} />;
  }
}

function App() {
  useEffect(() => void loadSource(), []);
  return (
    <Shell>
      <View />
    </Shell>
  );
}

applyTheme(theme.value);
const root = document.getElementById("app");
if (root) render(<App />, root);
